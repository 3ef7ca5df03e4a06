"""A real browser, a gateway, workers, and pages that fail a test if they do what they must not."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.common import Gate
from tests.support.fleet import Fleet

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), "")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
#: Whether a browser that is missing is an error.
IS_NEEDED = "STREAMQ_TEST_BROWSER" in os.environ
#: Where ``make test-ui`` puts axe-core.
AXE = Path(os.environ.get("STREAMQ_TEST_AXE", "build/ui/node_modules/axe-core/axe.min.js"))
APP = Path(__file__).parent


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if not CHROMIUM:
        (pytest.fail if IS_NEEDED else pytest.skip)("no chromium: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="no playwright")
    with api.sync_playwright() as play:
        started = play.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture
def gate(url: str, queue: str) -> Iterator[Gate]:
    started = Gate(url, queue)
    yield started
    started.end()


@pytest.fixture
def workers(url: str, queue: str, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(url, queue, tmp_path)
    fleet.start("-p", "1", "-c", "4", target="shop:app", cwd=APP)
    yield fleet
    fleet.end()


class Complaints(list[str]):
    """What a page did that it must not do."""

    def __init__(self) -> None:
        #: What may be in a complaint, because the test is about that.
        self.allowed: list[str] = []

    def allow(self, text: str) -> None:
        """Let complaints with this text be."""
        self.allowed.append(text)

    def left(self) -> list[str]:
        """Return the complaints that no test has asked for."""
        return [each for each in self if not any(text in each for text in self.allowed)]


@pytest.fixture
def open_page(browser: Any, gate: Gate) -> Iterator[Callable[..., Any]]:
    """Open pages of the gateway. Errors on the console and calls of other hosts fail the test."""
    contexts: list[Any] = []
    wrong = Complaints()

    ports = {gate.port}

    def check(request: Any) -> None:
        ours = tuple(f"http://127.0.0.1:{port}/" for port in ports)
        if not request.url.startswith((*ours, "data:", "blob:")):
            wrong.append(f"a call of {request.url}")

    def hear(message: Any) -> None:
        if message.type == "error":
            wrong.append(f"console: {message.text} ({message.location.get('url', '')})")

    def open_page(path: str = "/", *, ours: int = 0, **options: Any) -> Any:
        ports.add(ours or gate.port)
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("request", check)
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("console", hear)
        page.wrong = wrong
        page.goto(f"{gate.url}{path}" if path.startswith("/") else path)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong.left() == []
