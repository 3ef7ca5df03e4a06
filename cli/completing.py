"""Completes words of a command for a shell: commands, options, ids, handlers and queues.

A shell asks for every press of the tabulator, so this imports neither typer nor redis-py. The words
of the commands are in ``words.json``, which ``make docs`` writes. Ids come from ``.streamq`` and
from the server, which gets a tenth of a second to answer.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

#: The most requests and handlers that are offered, the newest first.
_MOST = 100
#: Options of every command that name a server.
_URL, _PREFIX, _QUEUE = ("--url", "-u"), ("--prefix",), ("--queue",)


def complete(words: Sequence[str]) -> None:
    """Print what the last word may become, one in a line. ``words`` are those after ``streamq``."""
    with suppress(Exception):  # a shell has no use for an error
        found = list(_Completion(words).candidates())
        sys.stdout.write("".join(f"{each}\n" for each in dict.fromkeys(found)))


class _Completion:
    """A command that is being typed."""

    def __init__(self, words: Sequence[str]) -> None:
        self._typed, self._last = list(words[:-1]), (words or [""])[-1]
        self._table: dict[str, Any] = json.loads(
            Path(__file__).with_name("words.json").read_text(encoding="utf-8")
        )
        self._name = self._command()

    def _command(self) -> str:
        """Return the command, with its second word if it has one; "" if none was typed yet."""
        names = [word for word in self._typed if not word.startswith("-")]
        both = " ".join(names[:2])
        if both in self._table:
            return both
        return names[0] if names and names[0] in self._table else ""

    def candidates(self) -> Iterator[str]:
        """Yield what the last word may become."""
        wanted = (each for each in self._all() if each.startswith(self._last))
        yield from wanted

    def _all(self) -> Iterator[str]:
        command = self._table.get(self._name)
        if command is None or self._name == "help":
            seconds = [name for name in self._table if name.startswith(f"{self._first()} ")]
            if seconds:
                yield from (name.split()[1] for name in seconds)
            else:
                yield from dict.fromkeys(name.split()[0] for name in self._table)
            return
        options = command["options"]
        before = self._typed[-1] if self._typed else ""
        value = options.get(before)
        if value is not None and value != "":
            yield from self._values(before, value)
            if not value.startswith("["):
                return
        if self._last.startswith("-"):
            yield from options
        elif "ID" in command["arguments"]:
            yield from self._ids()

    def _first(self) -> str:
        names = [word for word in self._typed if not word.startswith("-")]
        return names[0] if names and names[0] != "help" else ""

    def _values(self, option: str, value: str) -> Iterator[str]:
        if option in ("--resume", "--retry-failed"):
            yield from _runs_to_complete(is_finished=option == "--retry-failed")
        elif option == "--handler":
            yield from self._handlers()
        elif option in _QUEUE:
            yield from self._queues()
        elif "|" in value:
            yield from value.split("|")

    def _given(self, names: Sequence[str]) -> str:
        """Return the value of an option that was typed before; "" if it was not."""
        for option, value in zip(self._typed, self._typed[1:], strict=False):
            if option in names:
                return value
        return ""

    def _ids(self) -> Iterator[str]:
        yield from _runs_to_complete(is_finished=None)
        for key in ("open", "closed"):
            answer = self._ask("ZREVRANGE", self._key(key), "0", str(_MOST - 1))
            yield from answer if isinstance(answer, list) else ()

    def _handlers(self) -> Iterator[str]:
        answer = self._ask("ZRANGE", self._key("workers"), "0", str(_MOST - 1))
        for name in answer if isinstance(answer, list) else ():
            details = self._ask("HGET", self._key(f"worker:{name}"), "details")
            with suppress(ValueError, TypeError, KeyError):
                yield from json.loads(details)["handlers"]

    def _queues(self) -> Iterator[str]:
        for kind in ("open", "workers"):
            pattern = f"{self._prefix}:{{q:*}}:{kind}"
            answer = self._ask("SCAN", "0", "MATCH", pattern, "COUNT", "1000")
            for key in answer[1] if isinstance(answer, list) else ():
                yield key.partition("{q:")[2].rpartition("}")[0]

    def _ask(self, *words: str) -> Any:
        from streamq.driver.glance import Glance
        from streamq.settings import Settings, url_with_login

        if not hasattr(self, "_glance"):
            settings = Settings.from_env()
            url = url_with_login(self._given(_URL) or settings.url, settings)
            self._glance = Glance(url) if url else None
        return self._glance.ask(*words) if self._glance else None

    @property
    def _prefix(self) -> str:
        from streamq.settings import Settings

        return self._given(_PREFIX) or Settings.from_env().prefix

    def _key(self, name: str) -> str:
        queue = self._given(_QUEUE) or os.environ.get("STREAMQ_QUEUE") or "default"
        return f"{self._prefix}:{{q:{queue}}}:{name}"


def _runs_to_complete(*, is_finished: bool | None) -> Iterator[str]:
    """Yield the ids of runs in this folder, the last first; None: of all runs."""
    plans = []
    for plan in Path(".streamq").glob("*/plan.json"):
        if is_finished in (None, plan.with_name("finished.json").exists()):
            plans.append((-plan.stat().st_mtime_ns, plan.parent.name))
    yield from (name for _, name in sorted(plans))
