"""Text that is HTML or an escape sequence is shown as text, on every page, wherever it is from."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamq import Client, Protocol
from streamq.gateway import keys
from streamq.gateway.roles import Role
from streamq.model import Failure
from streamq.protocol.keys import QueueKeys, RequestKeys
from streamq.protocol.replies import Terms
from streamq.queue.changes import Change, note_change
from tests.conftest import ONE_KIND
from tests.gateway.common import Gate
from tests.ui.test_actions import log_in
from tests.ui.test_pages import Open, has_text

pytestmark = ONE_KIND

#: Each would do something if it came into a page as anything but text.
EVIL = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
QUOTES = "\"' onmouseover=alert(3) ${alert(4)} {{7*7}} javascript:alert(5)"
ESCAPES = "\x1b[31mred\x1b]0;title\x07 \u202eright to left\u2028 &lt;b&gt;"
ALL = f"{EVIL} {QUOTES} {ESCAPES}"


@pytest.fixture
def guarded(url: str, queue: str, tmp_path: Path) -> Iterator[tuple[Gate, str]]:
    """A gateway with keys, and the key of an operator with an odd name."""
    file = tmp_path / "streamq.keys"
    key = keys.add_key(file, "al", Role.OPERATOR)
    gate = Gate(url, queue, "--keys", str(file))
    yield gate, key
    gate.end()


def spoil(client: Client, protocol: Protocol, queue: str, request_id: str) -> None:
    """Put hostile text wherever somebody who may write could put it, past every check."""
    redis = protocol.connection.redis
    client.submit(
        [ALL, 2, 3], handler="h", queue=queue, id=request_id, labels={"a": EVIL, "b": QUOTES}
    )
    redis.hset(RequestKeys(request_id).meta, "labels", json.dumps({"a": ALL}))
    found = protocol.claim(request_id, "p.1-1", Terms(3), ("parts h",))
    failure = Failure(error=EVIL, message=ALL, traceback=ALL)
    protocol.fail(
        request_id, "p.1-1", 1, found.parts[0].number, [failure], kind="abandon", records=(0, 1)
    )
    note_change(protocol, queue, Change(who=EVIL, what=ALL, request=request_id))
    # A handler and a name of a file that no client lets pass, in a request of its own.
    other = f"{request_id}-b"
    client.submit([1], handler="h", queue=queue, id=other)
    redis.hset(RequestKeys(other).meta, "handler", EVIL)
    # A worker whose every word is hostile.
    now = round(time.time() * 1e3)
    details: dict[str, Any] = {
        "name": EVIL,
        "host": EVIL,
        "version": EVIL,
        "handlers": ["h", EVIL],
        "slots": 2,
        "busy": 1,
        "beat_ms": now,
        "started_ms": now,
        "running": [
            {"request": request_id, "part": 2, "since_ms": now - 9000, "handler": EVIL, "pid": 1}
        ],
    }
    protocol.beat(queue, "evil", 60_000, json.dumps(details).encode())
    redis.zadd(QueueKeys(queue).open, {EVIL: now})


def is_clean(page: Any) -> bool:
    """Whether no hostile text became an element or an attribute of the page."""
    return bool(
        page.evaluate(
            """() => !document.querySelector('main img, main script, iframe')
            && ![...document.querySelectorAll('*')].some(each =>
              [...each.attributes].some(a => a.name.startsWith('on')))
            && !document.title.includes('title\\u0007')"""
        )
    )


def test_hostile_text_is_text_on_every_page(
    guarded: tuple[Gate, str], open_page: Open, client: Client, protocol: Protocol,
    queue: str, request_id: str, tmp_path: Path,
) -> None:  # fmt: skip
    spoil(client, protocol, queue, request_id)
    gate, key = guarded
    page = open_page(f"{gate.url}/r/{request_id}", ours=gate.port)
    page.wrong.allow("status of 401")  # before the login
    dialogs: list[str] = []
    page.on("dialog", lambda each: dialogs.append(each.message))
    log_in(page, key)
    has_text(page, EVIL)  # its label
    page.get_by_role("link", name="Failures").click()
    page.get_by_role("button", name="1 sample").click()
    page.get_by_role("button", name="payload").click()
    page.wait_for_selector("pre.box")
    assert EVIL in page.locator("pre.box").last.inner_text()
    assert is_clean(page)
    for path, text in (
        ("", EVIL),
        ("/requests", EVIL),
        ("/levels", request_id),
        ("/workers", EVIL),
        ("/timeline", "Timeline"),
        ("/health", "doctor"),
        ("/log", EVIL),
    ):
        page.goto(f"{gate.url}/q/{queue}{path}")
        has_text(page, text)
        assert is_clean(page), path
    page.goto(f"{gate.url}/r/{request_id}/running")
    has_text(page, EVIL)
    page.goto(f"{gate.url}/r/{request_id}/log")
    page.wait_for_selector("td[data-k=what]")
    assert is_clean(page)
    # An address full of HTML is a page that is not there.
    page.goto(f"{gate.url}/q/{queue}/%3Cimg%20src=x%3E")
    has_text(page, "There is no such page")
    assert is_clean(page)

    # Who has a link sees the same, and the report is a file with the same text.
    as_operator = {"Authorization": f"Bearer {key}"}
    link = gate.call("POST", f"/v1/requests/{request_id}/share", {}, headers=as_operator).json
    visitor = open_page(gate.url + link["path"], ours=gate.port)
    has_text(visitor, EVIL)
    assert is_clean(visitor)
    told = gate.call("GET", f"/v1/requests/{request_id}/report.html", headers=as_operator)
    file = tmp_path / "report.html"
    file.write_text(told.text)
    page.wrong.allow("file:")
    page.goto(file.as_uri())
    has_text(page, "Failures")
    assert EVIL in page.locator("body").inner_text()
    assert is_clean(page)
    assert dialogs == []
    # Not one less-than sign of the data is in the file: nothing of it can end an element.
    data = told.text.split('id="report-data">')[1].split("</script>")[0]
    assert "<" not in data
    assert msgspec.json.decode(data)["id"] == request_id
