"""Takes pictures of the real pages, from a real server, gateway and workers.

``make screenshots`` writes those of the README and the docs. ``--all FOLDER`` writes every page,
light and dark, from a phone to 4K, to look at.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from streamq import Client
from streamq.gateway import keys
from streamq.gateway.roles import Role
from streamq.servers.local import LocalServer
from tests.gateway.common import Gate
from tests.support.waiting import wait_until
from tests.ui.conftest import APP, ARGUMENTS, CHROMIUM

IMAGES = Path(__file__).parents[2] / "docs" / "images"
QUEUE = "default"
#: Name of the picture, path of the page, text to wait for, width, height, scheme.
DOCS = (
    ("dashboard-overview", "/", "Needs attention", 1360, 1150, "light"),
    ("dashboard-request", "/r/nightly", "Why not faster", 1360, 1120, "light"),
    ("dashboard-timeline", f"/q/{QUEUE}/timeline", "lease", 1360, 520, "dark"),
    ("dashboard-flow", "/r/shop-7", "Stages of", 1360, 900, "light"),
)
#: Name of the picture, path of the page, text to wait for.
ALL = (
    ("overview", "/", "Needs attention"),
    ("requests", f"/q/{QUEUE}/requests", "nightly"),
    ("request", "/r/nightly", "Why not faster"),
    ("failures", "/r/nightly/failures", "grouped by"),
    ("running", "/r/crawl/running", "Worker"),
    ("requestlog", "/r/nightly/log", "set limit"),
    ("ended", "/r/monday", "How it ended"),
    ("paused", "/r/reindex", "it is paused"),
    ("flow", "/r/shop-7", "Stages of"),
    ("canary", "/r/trial", "canary"),
    ("levels", f"/q/{QUEUE}/levels", "Level"),
    ("workers", f"/q/{QUEUE}/workers", "worker"),
    ("timeline", f"/q/{QUEUE}/timeline", "lease"),
    ("health", f"/q/{QUEUE}/health", "doctor"),
    ("log", f"/q/{QUEUE}/log", "who changed"),
    ("nothing", "/q/unknown", "does not serve"),
    ("gone", "/r/there-is-none", "no such request"),
    ("missing", f"/q/{QUEUE}/what", "no such page"),
)
SIZES = (("phone", 360, 740), ("laptop", 1280, 800), ("4k", 3840, 2160))


@contextmanager
def mill(warm_s: float) -> Iterator[tuple[str, Gate]]:
    """A server, a gateway, workers, and requests that have been under way for a while."""
    server = LocalServer.start()
    url = server.url
    try:
        environment = os.environ | {"STREAMQ_URL": url, "STREAMQ_AUDIT_MS": "2000"}
        command = [sys.executable, "-m", "streamq.cli"]
        worker = [*command, "worker", "mill:app", "-p", "2", "-c", "6"]
        pools = [subprocess.Popen(worker, env=environment, cwd=APP) for _ in range(2)]
        gate: Gate | None = None
        try:
            gate = Gate(url, QUEUE)
            _submit(url)
            for words in (("set", "nightly", "--limit", "10"), ("pause", "reindex")):
                subprocess.run([*command, *words], env=environment, check=True)
            with closing(Client(url)) as client:
                wait_until(lambda: client.get("monday").status().state == "done", 120)
                wait_until(lambda: client.get("trial").status().waits_for_release, 120)
            time.sleep(warm_s)
            yield url, gate
        finally:
            if gate:
                gate.end()
            for pool in pools:
                pool.terminate()
            for pool in pools:
                pool.wait(30)
    finally:
        server.stop()


def _submit(url: str) -> None:
    sys.path.insert(0, str(APP))
    from mill import shop  # type: ignore[import-not-found]

    with closing(Client(url)) as client:
        client.submit(list(range(1, 200)), handler="clean", id="monday")
        client.submit(list(range(1, 480_001)), handler="clean", id="nightly", limit=5, level=40)
        client.submit(
            list(range(20_000)), handler="ask", id="crawl", limit=8, labels={"user": "62"}
        )
        client.submit(list(range(9_000)), handler="fetch", id="reindex", level=70)
        client.submit(list(range(400)), handler="clean_v2", id="imports-0815")
        client.submit(list(range(1, 700)), handler="ask", id="trial", level=5, canary=5)
        client.submit(list(range(15_000)), flow=shop, id="shop-7", level=30)


def take(
    browser: Any, gate: Gate, path: str, text: str, width: int, height: int, scheme: str, file: Path
) -> None:
    """Take one picture, after the page has shown a few frames."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    try:
        page = context.new_page()
        page.goto(f"{gate.url}{path}")
        if text:
            page.wait_for_function("text => document.body.innerText.includes(text)", arg=text)
        # Curves and the timeline need a while until there is something to see.
        page.wait_for_timeout(9_000 if "timeline" in path or path == "/" else 2_500)
        page.screenshot(path=str(file))
    finally:
        context.close()


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", type=Path, metavar="FOLDER")
    parser.add_argument("--warm", type=float, default=75.0, metavar="SECONDS")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with mill(options.warm) as (url, gate), sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        if options.all:
            _every_page(browser, url, gate, options.all, options.only)
        else:
            IMAGES.mkdir(exist_ok=True)
            for name, path, text, width, height, scheme in DOCS:
                take(browser, gate, path, text, width, height, scheme, IMAGES / f"{name}.png")
        browser.close()


def _every_page(browser: Any, url: str, gate: Gate, folder: Path, only: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    chosen = set(only.split(",")) if only else set()
    for name, path, text in ALL:
        if not chosen or name in chosen:
            _sizes(browser, f"{gate.url}{path}", text, folder, name)
    report = folder / "report.html"
    if not chosen or "report" in chosen:
        report.write_text(gate.get("/v1/requests/monday/report.html").text)
        _sizes(browser, report.absolute().as_uri(), "Failures", folder, "report")
    if not chosen or "login" in chosen:
        _guarded(browser, url, folder)


def _guarded(browser: Any, url: str, folder: Path) -> None:
    """Take the login, a shared link, and what they ask of a gateway with keys."""
    file = folder / "streamq.keys"
    file.unlink(missing_ok=True)
    key = keys.add_key(file, "alice", Role.OPERATOR)
    guarded = Gate(url, QUEUE, "--keys", str(file))
    try:
        _sizes(browser, guarded.url, "asks for a key", folder, "login")
        as_alice = {"Authorization": f"Bearer {key}"}
        shared = guarded.call("POST", "/v1/requests/crawl/share", {}, headers=as_alice)
        _sizes(browser, guarded.url + shared.json["path"], "Why not faster", folder, "shared")
    finally:
        guarded.end()


def _sizes(browser: Any, url: str, text: str, folder: Path, name: str) -> None:
    """Take one page in all sizes, light and dark."""
    context = browser.new_context(reduced_motion="reduce")
    try:
        page = context.new_page()
        page.goto(url)
        page.wait_for_function("text => document.body.innerText.includes(text)", arg=text)
        page.wait_for_timeout(9_000 if "timeline" in url else 1_500)
        for size, width, height in SIZES:
            page.set_viewport_size({"width": width, "height": height})
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                page.wait_for_timeout(400)
                page.screenshot(
                    path=str(folder / f"{name}-{size}-{scheme}.png"), full_page=size == "phone"
                )
            wide = page.evaluate("document.documentElement.scrollWidth")
            if wide > width:
                print(f"{name}: {wide} wide on {width}", flush=True)
    finally:
        context.close()


if __name__ == "__main__":
    main()
