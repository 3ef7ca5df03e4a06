"""How long to wait before something is tried again."""

import pytest

from streamq import backoff


@pytest.mark.parametrize(("attempt", "full"), [(1, 250), (2, 1_000), (3, 4_000), (9, 60_000)])
def test_pauses_of_parts_begin_with_a_quarter_and_are_four_times_as_long_each_time(
    attempt: int, full: int
) -> None:
    assert backoff.retry_ms(attempt, 1_000, 60_000, 1.0) == full
    assert backoff.retry_ms(attempt, 1_000, 60_000, 0.0) == full / 2


@pytest.mark.parametrize(("attempt", "full"), [(1, 250), (2, 500), (3, 1_000), (9, 60_000)])
def test_where_few_parts_fail_pauses_are_only_twice_as_long_each_time(
    attempt: int, full: int
) -> None:
    assert backoff.retry_ms(attempt, 1_000, 60_000, 1.0, are_few=True) == full
    assert backoff.retry_ms(attempt, 1_000, 60_000, 0.0, are_few=True) == full / 2


def test_few_fail_after_22_good_attempts_and_until_the_fifth_failure_in_a_row() -> None:
    troubles = backoff.BackoffTroubles()
    for _ in range(21):
        troubles.went_well()
    assert not troubles.are_few
    troubles.went_well()
    assert troubles.are_few

    for _ in range(100):
        troubles.went_well()
    for _ in range(4):
        troubles.failed()
        assert troubles.are_few
    troubles.failed()
    assert not troubles.are_few


def test_attempts_without_end_are_no_trouble() -> None:
    assert backoff.retry_ms(10**9, 1_000, 60_000, 1.0) == 60_000
    assert backoff.retry_ms(3, 0, 60_000) == 0


def test_other_pauses_double() -> None:
    assert [backoff.delay_ms(n, 200, 1_000, 1.0) for n in (1, 2, 3, 4)] == [200, 400, 800, 1_000]
