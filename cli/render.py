"""Output for people: tables, times, colours and a progress line. Only this module uses colour.

Data go to stdout and everything else to stderr, so that a pipe gets data only.
"""

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

import msgspec
import typer

from streamq.model import State, Status
from streamq.telemetry.logs import harmless_log_text

NOTHING = "-"
# Seconds and letter of a unit, and the same for the smaller unit that is shown beside it.
_SPANS = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "m"), (60, "m", 1, "s"))
_COLOURS = {
    "loading": "cyan",
    "open": "cyan",
    "paused": "yellow",
    "canary": "yellow",
    "cancelled": "yellow",
    "failed": "red",
    "all-failed": "red",
    "done": "green",
    "ok": "green",
    "warn": "yellow",
    "fail": "red",
}


def state_colours() -> dict[str, str]:
    """Return the colour of each state of a request."""
    return {word: colour for word, colour in _COLOURS.items() if word not in ("ok", "warn", "fail")}


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether the stream is a terminal. One that was closed before the start is None."""
    return stream is not None and stream.isatty()


def is_full_terminal(stream: TextIO | None) -> bool:
    """Return whether the stream is a terminal on which the cursor can be moved."""
    return is_terminal(stream) and os.environ.get("TERM", "dumb") != "dumb"


def _in_colour(text: str, colour: str | None, stream: TextIO | None) -> str:
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if colour is None or is_plain or not is_terminal(stream):
        return text
    return typer.style(text, fg=colour)


def heading(text: str) -> str:
    """Return a heading of the help, in bold on a terminal."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if is_plain or not is_terminal(sys.stdout) else typer.style(text, bold=True)


def data(text: str) -> None:
    """Print the data that the user asked for, on stdout."""
    typer.echo(text)


def as_json(value: Any) -> None:
    """Print the data that the user asked for as JSON: one line, on a terminal indented."""
    encoded = msgspec.json.encode(value)
    if is_terminal(sys.stdout):
        encoded = msgspec.json.format(encoded, indent=2)
    typer.echo(encoded.decode())


def note(text: str) -> None:
    """Print a remark on stderr."""
    _write_to_stderr(text)


def warning(text: str) -> None:
    """Print a warning on stderr."""
    _write_to_stderr(
        _in_colour(harmless_log_text(f"streamq: warning: {text}"), "yellow", sys.stderr)
    )


def error(text: str) -> None:
    """Print on stderr why the command failed."""
    _write_to_stderr(_in_colour(harmless_log_text(f"streamq: {text}"), "red", sys.stderr))


def _write_to_stderr(text: str) -> None:
    """Write to stderr. If the terminal was closed meanwhile, drop the text."""
    try:
        typer.echo(text, err=True)
    except OSError:
        write_no_more(sys.stderr)


def write_no_more(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, with what its buffer still holds."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def alarm(text: str) -> str:
    """Return the text in red, to stand out among data."""
    return _in_colour(text, "red", sys.stdout)


def verdict(word: str) -> str:
    """Return ``ok``, ``warn`` or ``fail``, in its colour and four columns wide."""
    return _in_colour(f"{word:<4}", _COLOURS.get(word), sys.stdout)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. The column of a header that begins with ``>`` is aligned to the right."""
    names = [header.lstrip(">") for header in headers]
    lines = [names, *([clean(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def cell(text: str, column: int) -> str:
        is_right = headers[column].startswith(">")
        padded = text.rjust(widths[column]) if is_right else text.ljust(widths[column])
        colour = _COLOURS.get(text) if names[column] == "STATE" else None
        return _in_colour(padded, colour, sys.stdout)

    return "\n".join(
        "  ".join(cell(text, column) for column, text in enumerate(line)).rstrip() for line in lines
    )


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Return names and values, one pair a line."""
    return "\n".join(f"{name:<10} {value}" for name, value in pairs)


def clean(text: str) -> str:
    """Return the text with every control character escaped: none may move a terminal's cursor."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def state_of(status: Status) -> str:
    """Return the state in one word.

    A live request that is paused is ``paused``, one whose canary has ended is ``canary``, and one
    that is done without a single record that is done is ``all-failed``.
    """
    if status.state is State.DONE and status.is_all_failed:
        return "all-failed"
    if status.paused and status.state.is_live:
        return "paused"
    return "canary" if status.waits_for_release else status.state.value


def labels(found: Mapping[str, str]) -> str:
    """Return ``env=test,user=62``, in the order of the names."""
    return ",".join(f"{name}={clean(value)}" for name, value in sorted(found.items()))


def count(number: int, noun: str) -> str:
    """Return ``1 part``, ``1,200 parts``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def blank_lines(number: int) -> str:
    """Return how many blank lines were passed, for the end of a summary; "" for none."""
    return f", {count(number, 'blank line')} skipped" if number else ""


def failed_of(number: int) -> str:
    """Return ``0 failed``, or ``3 of them failed``, to follow a number of records."""
    return f"{number:,} of them failed" if number else "0 failed"


def rate(per_second: float) -> str:
    """Return ``12.5/s``, or a rate per minute or hour where that is less than 1 a second."""
    for unit, factor in (("s", 1), ("m", 60), ("h", 3600)):
        amount = per_second * factor
        if amount >= 1 or unit == "h":
            return f"{amount:,.0f}/{unit}" if amount >= 100 else f"{amount:.3g}/{unit}"
    raise AssertionError("the last unit takes everything")


def pace(per_second: float, finished: int) -> list[str]:
    """Return the rate; ``starting`` while nothing is finished, nothing while it is 0."""
    if per_second > 0:
        return [rate(per_second)]
    return [] if finished else ["starting"]


def span(ms: float) -> str:
    """Return ``850ms``, ``12s``, ``1m25s``, ``2h05m``, ``7d``."""
    if ms < 1_000:
        return f"{max(0, round(ms))}ms"
    seconds = round(ms / 1e3)
    for size, unit, smaller, rest in _SPANS:
        if seconds >= size:
            amount = seconds % size // smaller
            return f"{seconds // size}{unit}" + (f"{amount:02d}{rest}" if amount else "")
    return f"{seconds}s"


def age(at_ms: int | None) -> str:
    """Return how long ago a moment was, by this machine's clock."""
    return span(time.time() * 1e3 - at_ms) if at_ms else NOTHING


def moment(at_ms: int) -> str:
    """Return a moment as date and time in the local zone."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_ms / 1e3))
    except (ValueError, OverflowError, OSError):
        return f"{at_ms} ms"


class StatusLine:
    """A line on stderr that is overwritten. If stderr is no terminal, nothing is shown."""

    def __init__(self, *, is_shown: bool = True) -> None:
        self._is_shown = is_shown and is_terminal(sys.stderr)

    def __enter__(self) -> "StatusLine":
        return self

    def __exit__(self, *_: object) -> None:
        self.show("")

    def show(self, text: str) -> None:
        """Replace the line."""
        if self._is_shown:
            try:
                sys.stderr.write(f"\r\x1b[K{text}")
                sys.stderr.flush()
            except OSError:
                write_no_more(sys.stderr)
