"""The pages in a real browser, with a real server, gateway and workers."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamq import Client
from tests.conftest import ONE_KIND
from tests.gateway.common import Gate
from tests.support.fleet import Fleet
from tests.support.waiting import wait_until
from tests.ui.conftest import AXE

pytestmark = ONE_KIND

Open = Callable[..., Any]
EVIL = "<img src=x onerror=alert(1)>"


def has_text(page: Any, text: str) -> None:
    page.wait_for_function("text => document.body.innerText.includes(text)", arg=text)


def test_request_moves_is_steered_and_ends(
    open_page: Open, client: Client, queue: str, request_id: str, workers: Fleet, gate: Gate
) -> None:
    request = client.submit(
        list(range(1_500)), handler="clean", queue=queue, id=request_id, limit=1, labels={"a": EVIL}
    )
    page = open_page(f"/r/{request_id}")
    has_text(page, "Why not faster")
    shown = page.locator(".tile .v").first
    before = shown.inner_text()
    # Live: what is shown changes by itself.
    page.wait_for_function(
        "old => document.querySelector('.tile .v').innerText !== old", arg=before
    )
    # Labels full of HTML are text.
    assert page.locator(".chip.label").first.inner_text() == f"a={EVIL}"
    assert page.locator("main img").count() == 0
    # Pause and resume.
    page.get_by_role("button", name="Pause").click()
    wait_until(lambda: request.status().paused, 20)
    page.get_by_role("button", name="Resume").click()
    wait_until(lambda: not request.status().paused, 20)
    # The limit, and undo.
    box = page.get_by_label("limit", exact=True)
    box.fill("3")
    box.press("Enter")
    wait_until(lambda: request.status().limit == 3, 20)
    page.get_by_role("button", name="undo").click()
    wait_until(lambda: request.status().limit == 1, 20)
    # Enter is one change, not two.
    told = gate.get(f"/v1/changes?queue={queue}").json
    assert [each["what"] for each in told].count("set limit 1 to 3") == 1
    box.fill("many")
    box.press("Enter")
    has_text(page, "a whole number from 1 to")
    assert request.status().limit == 1
    box.press("ArrowUp")
    box.press("Enter")
    wait_until(lambda: request.status().limit == 2, 20)
    rate = page.get_by_label("rate", exact=True)
    rate.fill("500/s")
    rate.press("Enter")
    wait_until(lambda: request.status().rate_limit == 500, 20)
    request.set(limit=4, rate="off")
    has_text(page, "How it ended")


def test_failed_parts_run_again_a_group_a_range_or_all(
    open_page: Open, client: Client, queue: str, request_id: str, workers: Fleet
) -> None:
    request = client.submit(list(range(100)), handler="clean", queue=queue, id=request_id)
    page = open_page(f"/r/{request_id}")
    has_text(page, "How it ended")
    # Failures in one group, with samples that are text, and a retry of the group.
    page.get_by_role("link", name=re.compile("Failures")).click()
    has_text(page, "no answer from part <n>")
    page.get_by_role("button", name="3 samples").click()
    has_text(page, EVIL)
    assert page.locator("main img").count() == 0
    page.get_by_role("button", name="retry group").click()
    page.locator("dialog[open]").wait_for()
    page.keyboard.press("Escape")
    page.locator("dialog[open]").wait_for(state="detached")
    page.get_by_role("button", name="retry group").click()
    page.get_by_role("button", name="Run them again").click()
    wait_until(lambda: request.status().retried == 1, 20)
    wait_until(lambda: request.status().parts.failed == 20, 60)
    # The map, by keyboard; and only the failed parts of a range run again.
    page.locator("sq-map canvas").focus()
    for key in ("ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    has_text(page, "Parts 2 \u2013 2")
    for key in (*["ArrowRight"] * 43, "Enter"):
        page.keyboard.press(key)
    has_text(page, "Parts 45 \u2013 45")
    page.get_by_role("button", name="retry this range").click()
    has_text(page, '{"first":45,"last":45}')
    page.get_by_role("button", name="Run them again").click()
    wait_until(lambda: request.status().retried == 2, 20)
    has_text(page, "1 part run again")
    # All of them.
    wait_until(lambda: request.status().parts.failed == 20, 60)
    page.get_by_role("button", name="Retry failed").click()
    has_text(page, f"streamq retry {request_id}")
    page.get_by_role("button", name="Run them again").click()
    wait_until(lambda: request.status().retried == 3, 20)


def test_cancel_asks_and_purge_removes(
    open_page: Open, client: Client, queue: str, request_id: str, gate: Gate
) -> None:
    request = client.submit(list(range(9)), handler="nobody", queue=queue, id=request_id)
    page = open_page(f"/r/{request_id}")
    page.get_by_role("button", name="Cancel…").click()
    has_text(page, f"streamq cancel {request_id}")
    page.get_by_role("button", name="No, leave it").click()
    assert request.status().state == "open"
    page.get_by_role("button", name="Cancel…").click()
    page.get_by_role("button", name="Cancel the request").click()
    wait_until(lambda: request.status().state == "cancelled", 20)
    page.get_by_role("button", name="Remove…").click()
    page.get_by_role("button", name="Remove it").click()
    wait_until(lambda: gate.get(f"/v1/requests/{request_id}").status == 404, 20)
    # Its page is no more: the browser is led to the others.
    page.wait_for_url(f"{gate.url}/q/{queue}/requests")
    page.goto(f"{gate.url}/q/{queue}/log")
    has_text(page, "cancel")


def test_many_parts_are_only_cancelled_by_whoever_types_the_id(
    open_page: Open, client: Client, queue: str, request_id: str
) -> None:
    request = client.submit(list(range(10_001)), handler="h", queue=queue, id=request_id)
    assert request.status().parts.total == 10_001
    page = open_page(f"/r/{request_id}")
    page.get_by_role("button", name="Cancel…").click()
    yes = page.get_by_role("button", name="Cancel the request")
    has_text(page, "10,001 parts will not be finished")
    assert yes.is_disabled()
    page.get_by_label(f"Type {request_id} to confirm").fill(request_id[:-1])
    page.keyboard.press("Enter")
    assert yes.is_disabled()
    page.get_by_label(f"Type {request_id} to confirm").fill(request_id)
    yes.click()
    wait_until(lambda: request.status().state == "cancelled", 20)


def test_hidden_tab_watches_no_more_and_a_proxy_that_holds_frames_back_is_said(
    open_page: Open, client: Client, queue: str, request_id: str
) -> None:
    client.submit([1], handler="h", queue=queue, id=request_id)
    page = open_page("/livez")
    page.clock.install()
    page.goto(f"{page.url.removesuffix('/livez')}/r/{request_id}")
    page.wait_for_function("() => document.querySelector('.state.live')")
    hide = """is => {
        Object.defineProperty(document, 'hidden', {get: () => is, configurable: true});
        document.dispatchEvent(new Event('visibilitychange')); }"""
    page.evaluate(hide, True)
    page.clock.fast_forward(29_000)
    assert page.locator(".state.live").count() == 1
    page.clock.fast_forward(2_000)
    page.evaluate(hide, False)
    has_text(page, "live")
    # From now on the proxy holds the stream back: frames are asked for.
    held: list[Any] = []
    page.route(re.compile(r"/v1/live\?topic"), lambda route: held.append(route))
    page.evaluate(hide, True)
    page.clock.fast_forward(31_000)
    page.evaluate(hide, False)
    page.clock.fast_forward(5_500)
    has_text(page, "every 2 s: a proxy holds the stream back")
    assert held


def test_without_javascript_the_page_says_what_to_use(open_page: Open) -> None:
    page = open_page("/", java_script_enabled=False)
    assert "streamq top" in page.locator("noscript").text_content()


def test_every_page_shows_real_data_and_keys_lead_there(
    open_page: Open, client: Client, queue: str, request_id: str, workers: Fleet
) -> None:
    client.submit(list(range(300)), handler="slow", queue=queue, id=request_id, level=7, limit=4)
    client.submit(list(range(9)), handler="missing", queue=queue, id=f"{request_id}-b")
    page = open_page("/")
    has_text(page, "Needs attention")
    has_text(page, "no live worker has the handler missing")
    for key, text in (
        ("r", request_id),
        ("l", "Level 7"),
        ("w", "slow"),
        ("h", "no live worker of queue"),
        ("t", "now"),
        ("g", "Nobody has changed anything"),
    ):
        page.keyboard.press("g")
        page.keyboard.press(key)
        has_text(page, text)
    page.keyboard.press("?")
    has_text(page, "next and previous request")
    page.keyboard.press("/")
    page.wait_for_function("() => document.activeElement?.id === 'search'")
    page.keyboard.type(f"{request_id}-b")
    page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 1")
    page.keyboard.press("Escape")
    assert "prefix=" in page.url
    page.goto(page.url)
    page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 1")
    # Without a mouse: to the request, and to its first button.
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/r/{request_id}-b")
    has_text(page, "Why not faster")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement.innerText") == "Pause":
            break
    page.keyboard.press("Enter")
    wait_until(lambda: client.get(f"{request_id}-b").status().paused, 20)


def test_filters_show_what_the_address_says(
    open_page: Open, client: Client, queue: str, request_id: str
) -> None:
    client.submit([1], handler="h", queue=queue, id=request_id)
    page = open_page(f"/q/{queue}/requests")
    has_text(page, request_id)
    state = page.get_by_label("State")
    state.select_option("done")
    has_text(page, "No request fits")
    assert "state=done" in page.url
    # Away from the filter by a link, and back by the browser's button.
    page.locator("nav.main").get_by_role("link", name="Requests").click()
    has_text(page, request_id)
    assert state.input_value() == "live"
    page.go_back()
    has_text(page, "No request fits")
    assert state.input_value() == "done"
    page.go_forward()
    has_text(page, request_id)
    assert state.input_value() == "live"


def test_title_of_the_tab_tells_how_the_request_ended_that_it_shows(
    open_page: Open, client: Client, queue: str, request_id: str
) -> None:
    requests = [client.submit([1], handler="h", queue=queue, id=f"{request_id}{n}") for n in "ab"]
    page = open_page(f"/r/{requests[0].id}")
    has_text(page, "Why not faster")
    assert page.title() == f"{requests[0].id} · streamq"
    requests[0].cancel()
    has_text(page, "How it ended")
    page.wait_for_function(
        "title => document.title === title", arg=f"cancelled: {requests[0].id} · streamq"
    )
    page.goto(f"{page.url.split('/r/')[0]}/q/{queue}")
    page.get_by_role("link", name=requests[1].id).click()
    has_text(page, "Why not faster")
    assert page.title() == f"{requests[1].id} · streamq"


def test_gateway_killed_and_back(
    open_page: Open, client: Client, url: str, queue: str, request_id: str, gate: Gate
) -> None:
    client.submit([1, 2], handler="h", queue=queue, id=request_id)
    page = open_page("/")
    has_text(page, "live")
    has_text(page, request_id)
    page.wrong.allow("net::ERR_")  # the browser tells of the connection that broke
    gate.process.kill()
    gate.process.wait()
    has_text(page, "gateway away")
    again = Gate(url, queue, "--listen", f"127.0.0.1:{gate.port}")
    try:
        client.submit([1, 2], handler="h", queue=queue, id=f"{request_id}-2")
        has_text(page, f"{request_id}-2")
        page.wait_for_function("() => document.querySelector('.state.live')")
    finally:
        again.end()


def test_report_is_one_file_that_needs_nothing(
    open_page: Open, client: Client, queue: str, request_id: str, gate: Gate, tmp_path: Path
) -> None:
    client.submit(list(range(20)), handler="h", queue=queue, id=request_id, labels={"x": EVIL})
    file = tmp_path / "report.html"
    file.write_text(gate.get(f"/v1/requests/{request_id}/report.html").text)
    page = open_page("/livez")
    page.wrong.allow("a call of file:")
    page.goto(file.as_uri())
    has_text(page, "20 parts")
    has_text(page, EVIL)
    assert page.locator("main img").count() == 0


@pytest.mark.skipif(not AXE.is_file(), reason="no axe-core: make test-ui gets it")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(
    open_page: Open, client: Client, queue: str, request_id: str, workers: Fleet, scheme: str
) -> None:
    client.submit(list(range(120)), handler="clean", queue=queue, id=request_id)
    wait_until(lambda: client.get(request_id).status().parts.failed >= 20, 60)
    client.submit(list(range(2_000)), handler="slow", queue=queue, id=f"{request_id}-b", limit=2)
    page = open_page("/", color_scheme=scheme, bypass_csp=True, reduced_motion="reduce")
    found: list[str] = []

    def look(what: str) -> None:
        page.evaluate(AXE.read_text())
        result = page.evaluate("async () => (await axe.run()).violations")
        found.extend(
            f"{what}: {each['id']}: {json.dumps(each['nodes'][0]['html'])[:160]}" for each in result
        )

    for path, text in (
        *every_page(queue, request_id),
        (f"/q/{queue}-empty", "does not serve"),
        ("/r/there-is-none", "no such request"),
        (f"/q/{queue}/what", "There is no such page"),
    ):
        page.wrong.allow("status of 400")  # of the queue that is not served
        visit(page, path, text)
        look(path)
    # Also what appears when somebody acts: chosen rows, samples, a cell, a question, a message.
    visit(page, f"/q/{queue}/requests", request_id)
    page.get_by_label(f"choose {request_id}-b").check()
    page.get_by_role("button", name="cancel…").click()
    page.locator("dialog[open]").wait_for()
    look("question")
    page.keyboard.press("Escape")
    visit(page, f"/r/{request_id}/failures", "no answer")
    page.get_by_role("button", name="3 samples").click()
    page.locator("sq-map canvas").focus()
    for key in (*["ArrowRight"] * 43, "Enter"):
        page.keyboard.press(key)
    has_text(page, "retry this range")
    page.keyboard.press("?")
    page.locator(".toast").wait_for()
    look("samples, a cell and a message")
    assert found == []


def test_nothing_is_wider_than_a_phone(
    open_page: Open, client: Client, queue: str, request_id: str, workers: Fleet
) -> None:
    long = f"{request_id}{'n' * 60}"[:63]
    labels = {"a-rather-long-name": "v" * 60, "b": "c"}
    client.submit(list(range(120)), handler="clean", queue=queue, id=long, labels=labels)
    client.submit(list(range(2_000)), handler="slow", queue=queue, id=f"{request_id}-b", limit=2)
    wait_until(lambda: client.get(long).status().parts.failed >= 20, 60)
    page = open_page("/", viewport={"width": 360, "height": 740})
    for path, text in (*every_page(queue, long), (f"/r/{request_id}-b", "Steer")):
        visit(page, path, text)
        assert wider_than(page, 360) == [], path


def wider_than(page: Any, width: int) -> list[str]:
    """Return what makes a page wider than it may be."""
    found: list[str] = page.evaluate(
        """width => {
        const scrolls = each => each && (/auto|scroll/.test(getComputedStyle(each).overflowX)
            || each.matches('thead, .visually-hidden') || scrolls(each.parentElement));
        const found = document.documentElement.scrollWidth <= width ? [] : ['the page'];
        // What a card cuts off cannot be seen either.
        return [...found, ...[...document.querySelectorAll('header.top *, main *')]
            .filter(each => each instanceof HTMLElement && !scrolls(each)
                && each.getBoundingClientRect().right > width + 1)
            .map(each => `${each.tagName}.${each.className} ${each.textContent.slice(0, 60)}`)];
        }""",
        width,
    )
    return found


def every_page(queue: str, request_id: str) -> Iterator[tuple[str, str]]:
    """Yield the address of each page, and text that it shows once it has real data."""
    yield "/", "Slots busy"
    yield f"/q/{queue}", "Slots busy"
    yield f"/q/{queue}/requests?state=ended", request_id
    yield f"/q/{queue}/requests", "slow"
    yield f"/q/{queue}/levels", "Level 50"
    yield f"/q/{queue}/workers", "slow"
    yield f"/q/{queue}/timeline", "a part failed"
    yield f"/q/{queue}/health", "doctor"
    yield f"/q/{queue}/log", "who changed"
    yield f"/r/{request_id}", "Policy"
    yield f"/r/{request_id}/failures", "no answer"
    yield f"/r/{request_id}/running", "Summary"
    yield f"/r/{request_id}/log", "Nobody has changed"


def visit(page: Any, path: str, text: str) -> None:
    """Go to a page of the same gateway, and wait until it shows the text."""
    page.goto("/".join(page.url.split("/")[:3]) + path)
    has_text(page, text)
