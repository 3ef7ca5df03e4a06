"""A process that runs pytest again and again in one checkout, each time in a copy of itself.

Importing pytest and the driver takes longer than most tests do. Here it is done once; then each
run is a fork. Nothing of the checkout is imported before the fork, for it changes between runs.
It reads orders from standard input, a line of JSON each, and answers each with such a line.
"""

import importlib
import json
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from typing import Any

import pytest

#: What tests import besides the checkout, and pytest's own plugins. What is missing is left out.
_NEEDED = ("redis.cluster", "redis.asyncio", "msgspec", "hiredis", "asyncio")
#: The plugin of Hypothesis imports all of it at the end of each run, and rewrites its asserts.
#: Plugins that are imported already cannot have theirs rewritten, and need not.
_QUICK = ["-pno:cacheprovider", "-pno:hypothesispytest", "-pno:xdist"]
_QUICK += ["-W", "ignore:Module already imported"]


#: A mutant that asks for memory without end gets no more: the machine has others to serve.
_MOST_BYTES = 6 * 2**30
#: A test has so many times what it takes without a mutant.
_PATIENCE = 5.0


class _Watch:
    """Sorts tests, the quickest first, and notes how long each takes and which one fails."""

    def __init__(self, seconds: dict[str, float], least_s: float) -> None:
        self._known = seconds
        self._least_s = least_s
        self.seconds: dict[str, float] = {}
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self._known.get(item.nodeid, 0.0))
        for item in items:
            if item.nodeid in self._known and not item.get_closest_marker("timeout"):
                limit_s = max(self._least_s, _PATIENCE * self._known[item.nodeid])
                item.add_marker(pytest.mark.timeout(limit_s))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed = self.failed or report.nodeid


def _run(order: dict[str, Any], out: int) -> None:
    """Run pytest, and write what came of it. In a process of its own, which ends with it."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    watch = _Watch(order["seconds"], order["each_s"])
    options = ["-x", "-q", *_QUICK]
    code = 1
    try:
        code = int(pytest.main([*options, *order["words"]], plugins=[watch]))
    finally:
        told = {"code": code, "failed": watch.failed, "seconds": watch.seconds}
        os.write(out, json.dumps(told).encode() + b"\n")
        os._exit(0)


def _look(order: dict[str, Any]) -> dict[str, Any]:
    """Run pytest in a fork. What takes too long is ended, with all that it started."""
    ours, theirs = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        _run(order, theirs)
    os.close(theirs)
    text = b""
    try:
        while not text.endswith(b"\n"):
            left_s = order["limit_s"] - (time.monotonic() - began)
            ready, _, _ = select.select([ours, 0], [], [], max(0.0, left_s))
            if 0 in ready:
                sys.exit(0)  # whoever asked is gone, for it asks one thing at a time
            if not ready:
                return {"code": 1, "failed": "it took too long", "seconds": {}}
            some = os.read(ours, 2**16)
            if not some:
                return {"code": 1, "failed": "pytest itself ended", "seconds": {}}
            text += some
        told: dict[str, Any] = json.loads(text)
        return told
    finally:
        # Whatever the tests started and a mutant kept them from ending.
        for end in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                end(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ours)


def main() -> None:
    """Answer orders until there are no more."""
    for name in _NEEDED:
        with suppress(ImportError):
            importlib.import_module(name)
    # Not by lines of a buffer: who waits in select would not see what is in it.
    pending = b""
    while some := os.read(0, 2**16):
        pending += some
        if pending.endswith(b"\n"):
            os.write(1, json.dumps(_look(json.loads(pending))).encode() + b"\n")
            pending = b""


if __name__ == "__main__":
    main()
