"""Tickets: what goes in comes out, and nobody else can make one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamq.gateway.ticket import BadTicket, PackedNumbers, Ticket, TicketSigner

numbers = st.integers(1, 2**53)
tickets = st.builds(
    Ticket,
    parts=st.lists(numbers, max_size=5).map(PackedNumbers.of),
    records=st.lists(numbers, max_size=5).map(PackedNumbers.of),
    attempts=st.dictionaries(numbers, numbers, max_size=3),
    number=numbers,
    created_ms=numbers,
    lease_ms=numbers,
    backoff_ms=numbers,
    backoff_max_ms=numbers,
    quantum_ms=numbers,
    part_s=st.floats(0, 1e6),
    handed_ms=numbers,
    late_ms=numbers,
    key=st.just("k"),
)
SIGNER = TicketSigner(b"secret")


@given(tickets)
def test_ticket_that_was_sealed_is_opened(ticket: Ticket) -> None:
    assert SIGNER.open(SIGNER.seal(ticket), "k") == ticket


@given(tickets, st.data())
def test_ticket_of_which_one_character_was_changed_is_refused(
    ticket: Ticket, data: st.DataObject
) -> None:
    text = SIGNER.seal(ticket)
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(codec="utf-8").filter(lambda each: each != text[at]))
    with pytest.raises(BadTicket):
        SIGNER.open(text[:at] + other + text[at + 1 :], "k")


@given(st.text())
def test_text_that_is_no_ticket_is_refused(text: str) -> None:
    with pytest.raises(BadTicket):
        SIGNER.open(text, "k")


@given(tickets)
def test_ticket_of_another_secret_or_key_is_refused(ticket: Ticket) -> None:
    text = SIGNER.seal(ticket)
    with pytest.raises(BadTicket, match="no ticket of this gateway"):
        TicketSigner(b"another").open(text, "k")
    with pytest.raises(BadTicket, match="another key"):
        SIGNER.open(text, "other")


@given(st.lists(st.integers(0, 50)))
def test_runs_are_the_numbers_they_were_made_of(some: list[int]) -> None:
    assert PackedNumbers.of(some).numbers() == some


def test_a_batch_of_neighbours_takes_few_bytes() -> None:
    assert len(PackedNumbers.of(range(1, 501)).runs) == 1
    assert len(PackedNumbers.of([1] * 500).runs) == 1
