"""The pages in a real browser: actions by role, links, keyboard, what is live, and odd names."""

import re
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from streamq import Client
from streamq.gateway import keys
from streamq.gateway.roles import Role
from tests.conftest import ONE_KIND
from tests.gateway.common import Gate
from tests.support.fleet import Fleet
from tests.support.waiting import wait_until
from tests.ui.test_pages import EVIL, Open, has_text, wider_than

pytestmark = ONE_KIND


@pytest.fixture
def keyed(url: str, queue: str, tmp_path: Path) -> Iterator[Callable[[Role], tuple[Gate, str]]]:
    """A gateway with keys; returns it and the key of a role."""
    file = tmp_path / "streamq.keys"
    texts = {role: keys.add_key(file, role.value, role) for role in (Role.READER, Role.OPERATOR)}
    gate = Gate(url, queue, "--keys", str(file))
    yield lambda role: (gate, texts[role])
    gate.end()


def log_in(page: Any, key: str) -> None:
    page.get_by_label("Key").fill(key)
    page.get_by_role("button", name="Log in").click()


def test_reader_logs_in_sees_all_and_changes_nothing(
    keyed: Any, open_page: Open, client: Client, queue: str, request_id: str
) -> None:
    request = client.submit([1, 2], handler="h", queue=queue, id=request_id)
    gate, key = keyed(Role.READER)
    page = open_page(f"{gate.url}/r/{request_id}", ours=gate.port)
    page.wrong.allow("status of 40")  # before the login, and what is refused
    has_text(page, "asks for a key")
    log_in(page, "sqk_wrong")
    has_text(page, "the key is unknown or has expired")
    log_in(page, key)
    has_text(page, "Why not faster")
    assert page.get_by_role("button", name=re.compile("Pause|Cancel|Retry")).count() == 0
    assert page.locator("input").count() == 0
    # What the page does not offer is refused, too.
    for verb in ("pause", "cancel", "retry", "release", "share"):
        status = page.evaluate(
            "async path => (await fetch(path, {method: 'POST', body: '{}'})).status",
            f"/v1/requests/{request_id}/{verb}",
        )
        assert status == 403, verb
    assert request.status().state == "open"
    page.get_by_role("button", name="log out").click()
    has_text(page, "asks for a key")


def test_link_shows_one_request(
    keyed: Any, open_page: Open, client: Client, queue: str, request_id: str
) -> None:
    client.submit([1, 2], handler="h", queue=queue, id=request_id)
    gate, key = keyed(Role.OPERATOR)
    page = open_page(f"{gate.url}/r/{request_id}", ours=gate.port)
    page.wrong.allow("status of 401")
    log_in(page, key)
    page.get_by_role("button", name="Share…").click()
    link = page.locator("dialog code").inner_text()
    page.get_by_role("button", name="Done").click()
    visitor = open_page(link, ours=gate.port)
    has_text(visitor, "Why not faster")
    assert visitor.url == f"{gate.url}/r/{request_id}"
    assert visitor.locator("nav.main, main button:not(.small)").count() == 0
    # It has the tabs that a link may show; every other address leads back to the request.
    assert visitor.locator("nav.tabs a").all_inner_texts() == ["Summary", "Failures 0"]
    visitor.get_by_role("link", name="Failures").click()
    has_text(visitor, "No part has failed")
    visitor.get_by_role("link", name="streamq").click()
    visitor.wait_for_url(f"{gate.url}/")
    has_text(visitor, "Why not faster")
    visitor.goto(f"{gate.url}/q/{queue}/log")
    has_text(visitor, "Why not faster")
    visitor.goto(f"{gate.url}/r/{request_id}/running")
    has_text(visitor, "There is no such page")


def test_what_is_refused_is_said_and_does_not_look_like_a_gateway_that_is_away(
    open_page: Open, queue: str
) -> None:
    page = open_page(f"/q/{queue}-other")
    page.wrong.allow("status of 400")
    has_text(page, "this gateway does not serve the queue")
    assert "gateway away" not in page.locator("header.top").inner_text()
    # It is not asked for again and again: once by the stream, and once for the reason.
    asked: list[str] = []
    page.on("request", lambda each: asked.append(each.url))
    page.wait_for_timeout(2_500)
    assert [each for each in asked if "/v1/live" in each] == []
    # The way on leads to a queue that is served.
    page.get_by_role("link", name="all requests").click()
    has_text(page, "No request fits")
    page.get_by_role("link", name="streamq").click()
    page.wait_for_url("**/")
    has_text(page, "This queue is empty")


def test_news_are_shown_within_a_second_and_a_half(
    open_page: Open, client: Client, queue: str, request_id: str, workers: Fleet
) -> None:
    client.submit(list(range(2_000)), handler="slow", queue=queue, id=request_id, limit=4)
    page = open_page(f"/r/{request_id}")
    has_text(page, "Why not faster")
    page.evaluate(
        """() => { window.seen = []; let last = '';
        new MutationObserver(() => { const now = document.querySelector('.legend b').innerText;
          if (now !== last) { last = now; window.seen.push(performance.now()); } })
        .observe(document.body, {childList: true, subtree: true, characterData: true}); }"""
    )
    page.wait_for_function("() => window.seen.length >= 7")
    seen = page.evaluate("window.seen")
    gaps = [b - a for a, b in pairwise(seen[1:])]
    assert median(gaps) <= 1_500, gaps
    # So is a change that somebody else makes.
    waits = []
    request = client.get(request_id)
    for level in range(51, 56):
        begun = time.monotonic()
        request.set(level=level)
        page.wait_for_function(
            "level => document.querySelector('[data-edit$=level]').value === level", arg=f"{level}"
        )
        waits.append(time.monotonic() - begun)
    assert median(waits) <= 1.5, waits
    # An end is pushed at once.
    waits = []
    for number in range(3):
        request = client.submit([1, 2], handler="none", queue=queue, id=f"{request_id}-{number}")
        page.goto(f"{page.url.split('/r/')[0]}/r/{request.id}")
        has_text(page, "Why not faster")
        begun = time.monotonic()
        request.cancel()
        has_text(page, "How it ended")
        waits.append(time.monotonic() - begun)
    assert median(waits) <= 1.5, waits


def test_canary_is_released_and_levels_move_by_keyboard(
    open_page: Open, client: Client, queue: str, request_id: str, workers: Fleet
) -> None:
    request = client.submit(list(range(60)), handler="slow", queue=queue, id=request_id, canary=2)
    page = open_page(f"/r/{request_id}")
    has_text(page, "The others wait for the release")
    page.goto(f"{page.url.split('/r/')[0]}/q/{queue}/levels")
    card = page.locator(".pcard").first
    card.focus()
    page.keyboard.press("]")
    wait_until(lambda: request.status().level == 51, 20)
    # By mouse: the card is dragged to the level of another request.
    client.submit([1], handler="none", queue=queue, level=9)
    page.locator("[data-level='51'] .pcard").drag_to(page.locator("[data-level='9'] h2"))
    wait_until(lambda: request.status().level == 9, 20)
    page.locator(".toast", has_text="51 → 9").get_by_role("button", name="undo").click()
    wait_until(lambda: request.status().level == 51, 20)
    page.goto(f"{page.url.split('/q/')[0]}/r/{request_id}/log")
    has_text(page, "set level 50 to 51")
    button = page.get_by_role("button", name="Release")
    button.focus()
    page.keyboard.press("Enter")
    wait_until(lambda: request.status().canary is None, 20)
    has_text(page, "release")


def test_several_requests_are_paused_and_cancelled(
    open_page: Open, client: Client, queue: str, request_id: str
) -> None:
    requests = [
        client.submit([1], handler="h", queue=queue, id=f"{request_id}-{n}") for n in range(3)
    ]
    page = open_page(f"/q/{queue}/requests")
    for each in requests[:2]:
        page.get_by_label(f"choose {each.id}").check()
    page.get_by_role("button", name="pause").click()
    wait_until(lambda: [r.status().paused for r in requests] == [True, True, False], 20)
    # What was done is chosen no more.
    page.get_by_text("requests chosen").wait_for(state="detached")
    for each in requests[:2]:
        page.get_by_label(f"choose {each.id}").check()
    page.get_by_role("button", name="cancel…").click()
    page.get_by_role("button", name="Cancel 2 requests").click()
    wait_until(lambda: [r.status().state for r in requests][:2] == ["cancelled"] * 2, 20)
    assert requests[2].status().state == "open"


def test_odd_names_and_many_handlers_are_text_and_fit(
    open_page: Open, client: Client, queue: str, request_id: str
) -> None:
    long = "n" * 60
    labels = {"rtl": "שלום עולם", "emoji": "🦀" * 60, "evil": EVIL}
    client.submit([1], handler=long, queue=queue, id=f"{request_id}{long}"[:64], labels=labels)
    for number in range(400):
        client.submit([1], handler=f"handler-{number:04}", queue=queue)
    page = open_page("/", viewport={"width": 360, "height": 740})
    has_text(page, "Needs attention")
    for path in (f"/q/{queue}/requests?sort=oldest", f"/r/{request_id}{long}"[:67], "/"):
        page.goto(page.url.split("/", 3)[0] + "//" + page.url.split("/", 3)[2] + path)
        has_text(page, long if path != "/" else "Needs attention")
        assert wider_than(page, 360) == [], path
        assert page.locator("main img").count() == 0


def test_request_that_vanishes_while_it_is_watched(
    open_page: Open, client: Client, queue: str, request_id: str
) -> None:
    request = client.submit([1], handler="h", queue=queue, id=request_id)
    page = open_page(f"/r/{request_id}")
    has_text(page, "Why not faster")
    request.cancel()
    request.purge()
    has_text(page, "there is no such request, or no more")
    page.get_by_role("link", name="Overview").click()
    has_text(page, "Requests")
