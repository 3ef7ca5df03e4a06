"""How much of a load may be under way, by what waits in the server and in spools."""

from streamq.runs.window import Window
from tests.conftest import ONE_KIND
from tests.support.by_hand import RequestByHand

pytestmark = ONE_KIND

SIZE = 8_000


class Spools:
    """So many bytes wait in spools."""

    def __init__(self) -> None:
        self.size = 0

    def __call__(self) -> int:
        return self.size


def window_of(driver: RequestByHand, spools: Spools) -> Window:
    """A window for parts of 1,000 bytes each, of which the server has only where they are."""
    driver.open()
    driver.append(10)
    window = Window(driver.protocol, driver.id, SIZE, counts_results=True, spooled=spools)
    window.add(10, 10_000)
    return window


def test_results_in_spools_fill_the_window(driver: RequestByHand) -> None:
    spools = Spools()
    window = window_of(driver, spools)
    holder, _ = driver.claim(10)
    driver.finish(holder, range(1, 11))
    spools.size = SIZE

    window.look()
    assert window.is_full

    spools.size = SIZE // 2
    window.look()
    assert not window.is_full


def test_lines_in_spools_that_nobody_was_told_of_do_not_fill_it_for_ever(
    driver: RequestByHand,
) -> None:
    spools = Spools()
    window = window_of(driver, spools)
    holder, _ = driver.claim(10)
    driver.finish(holder, range(1, 11))
    spools.size = 2 * SIZE
    window.look()
    assert window.is_full

    driver.protocol.commit(driver.id, "", "t", forget=[f"{n}" for n in range(1, 11)])

    window.look()
    assert not window.is_full


def test_one_large_result_does_not_make_all_others_seem_large(driver: RequestByHand) -> None:
    """Seven parts wait. They are believed to become as large as results are now, or were lately."""
    spools = Spools()
    window = window_of(driver, spools)
    holder, _ = driver.claim(3)
    driver.finish(holder, [1])
    spools.size = 100_000
    window.look()
    assert window.is_full

    driver.protocol.commit(driver.id, "", "t", forget=["1"])
    holder, _ = driver.claim(2)
    driver.finish(holder, [2, 3])
    spools.size = 20
    looks = 0
    while window.is_full and looks < 50:
        window.look()
        looks += 1

    assert not window.is_full
    assert looks > 1
