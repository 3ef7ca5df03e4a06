"""``streamq top``."""

import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
import typer
from rich.cells import cell_len, set_cell_size

from streamq.errors import Damaged, InvalidValue, ServerError
from streamq.queue.watching import View, Watch, Watched

from .. import render
from ..connecting import connected
from ..finding import place_of_queue
from ..shared_options import JsonOption, PrefixOption, QueueOption, UrlOption

EVERY_S = 1.0
#: How long a look waits for the server: keys are heeded after that.
REPLY_S = 1.0
#: What a key sorts by, and how. The best comes first.
SORTS: dict[str, tuple[str, Callable[[Watched], Any]]] = {
    "n": ("newest", lambda each: -each.status.created_ms),
    "p": ("progress", lambda each: -each.progress),
    "r": ("rate", lambda each: -each.rate),
    "f": ("failures", lambda each: -(each.status.records.failed + each.status.parts.failed)),
    "l": ("level", lambda each: each.status.level),
}
UP, DOWN, PAGE_UP, PAGE_DOWN, HOME = "\x1b[A", "\x1b[B", "\x1b[5~", "\x1b[6~", "\x1b[H"
#: A terminal may send either form of an arrow.
_OTHER_FORMS = {"\x1bOA": UP, "\x1bOB": DOWN, "\x1bOH": HOME, "\x1b[1~": HOME, "k": UP, "j": DOWN}
HEADERS = (
    "ID",
    "STATE",
    ">LV",
    "HANDLER",
    "LABEL",
    ">PARTS",
    ">RECS",
    ">RATE",
    ">ETA",
    ">FAIL",
    ">RUN",
)
#: Columns that are cut when the terminal is narrow, and the least width of each.
_CUT = {"ID": 8, "HANDLER": 6, "LABEL": 5}
_LEAST_ROWS = 3
_ROOM_FOR_WORKERS = 8


def top(
    queue: QueueOption = "default",
    is_once: Annotated[
        bool, typer.Option("--once", help="Print everything once, and end: for scripts.")
    ] = False,
    sort: Annotated[
        str,
        typer.Option(
            "--sort",
            metavar="|".join(SORTS),
            help="Sort by newest, progress, rate, failures or level: the key of that order.",
        ),
    ] = "n",
    as_json: JsonOption = False,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Watch the requests of a queue, the tokens that wait at each level, and the workers.

    Keys: n newest first, p progress, r rate, f failures, l level; arrows scroll; q quits. RATE is
    records per second over the last 10 s, RUN parts that run and the limit. Each second it sends
    the server at most 184 commands: of more than 60 requests, those on the screen are read each
    time and the others in turn. --once and --json read the newest 1,000.

        streamq top --queue default
    """
    if sort not in SORTS:
        raise InvalidValue(f"--sort {sort!r} is none of {', '.join(SORTS)}")
    place = place_of_queue(url, prefix, queue)
    queue = place.queue
    with connected(place.url, place.prefix, is_patient=is_once or as_json) as protocol:
        if is_once or as_json:
            view = _top_view_read_once(Watch(protocol, queue))
            if as_json:
                render.as_json(_top_as_json(view, sort))
                return
            width = shutil.get_terminal_size().columns if render.is_terminal(sys.stdout) else 1_000
            render.data("\n".join(top_frame(view, sort, width).lines))
            return
        if not (render.is_terminal(sys.stdin) and render.is_full_terminal(sys.stdout)):
            raise InvalidValue("this is no terminal to watch on: say --once or --json")
        hasty = protocol.hasty(REPLY_S)
        try:
            _show_top_until_q(Watch(hasty, queue), queue, sort)
        finally:
            hasty.connection.close()


class TopFrame(msgspec.Struct, frozen=True):
    """One picture: its lines, which requests it shows, and how far it is scrolled."""

    lines: list[str]
    shown: list[str]
    first: int


def top_frame(
    view: View, sort: str, width: int, height: int | None = None, first: int = 0, note: str = ""
) -> TopFrame:
    """Return what is shown in so many columns and lines (None: as many as it takes)."""
    name, key = SORTS[sort]
    requests = sorted(sorted(view.requests, key=lambda each: each.status.id, reverse=True), key=key)
    slots, busy = (sum(getattr(w, what) for w in view.workers) for what in ("slots", "busy"))
    head = [
        f"streamq top - queue {view.queue}, {render.count(view.open, 'request')} open, "
        f"by {name}  {note}".rstrip(),
        f"{render.count(len(view.workers), 'worker')}, {busy:,} of {slots:,} slots busy",
        _top_line_of_levels(view),
    ]
    workers = [
        _top_line_of_worker(each) for each in sorted(view.workers, key=lambda each: -each.busy)
    ]
    if height is None:
        rows = len(requests)
    else:
        # The header of the requests, a line that says how many more there are, and the keys.
        room = max(_LEAST_ROWS, height - len(head) - 3)
        # In a low terminal the second line says enough of the workers.
        kept = min(len(workers), room // 4 if room >= _ROOM_FOR_WORKERS else 0)
        rows = room - (kept + 1 if kept else 0)
        workers = _cut_top_frame(workers, kept)
    first = max(0, min(first, len(requests) - rows))
    some = requests[first : first + rows]
    lines = [*head, *_top_table([_top_cells_of_request(each) for each in some], width)]
    if height is not None:
        above, below = first, len(requests) - first - len(some)
        lines += [""] * (rows - len(some))
        lines.append(f"  {above:,} above, {below:,} below" if above or below else "")
    if workers:
        lines += ["WORKERS", *workers]
    if height is not None:
        lines.append("n newest  p progress  r rate  f failures  l level  arrows  q quit")
        lines = lines[:height]
    return TopFrame(
        [_cut_top_line(line, width) for line in lines], [each.status.id for each in some], first
    )


def _top_cells_of_request(each: Watched) -> tuple[str, ...]:
    status = each.status
    return (
        status.id,
        render.state_of(status),
        f"{status.level}",
        status.handler,
        render.labels(status.labels) or render.NOTHING,
        f"{_top_number(status.parts.done)}/{_top_number(status.parts.total)}",
        _top_number(status.records.total),
        render.rate(each.rate) if each.rate else render.NOTHING,
        render.NOTHING if each.eta_s is None else render.span(each.eta_s * 1e3),
        _top_number(status.records.failed or status.parts.failed),
        f"{status.parts.running}/{status.limit}",
    )


def _top_table(rows: Sequence[tuple[str, ...]], width: int) -> list[str]:
    """Return the lines of the table. Long ids, handlers and labels are cut to fit the width."""
    names = [header.lstrip(">") for header in HEADERS]
    lines = [tuple(names), *(tuple(render.clean(cell) for cell in row) for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    surplus = sum(widths) + len(widths) - 1 - width
    while surplus > 0:
        # The widest of those that can be cut gives way first.
        room = {at: widths[at] - _CUT[name] for at, name in enumerate(names) if name in _CUT}
        at = max(room, key=lambda column: (room[column] > 0, widths[column]))
        if room[at] <= 0:
            break
        widths[at] -= 1
        surplus -= 1

    def cell(text: str, at: int) -> str:
        cut = _cut_top_line(text, widths[at])
        padding = " " * (widths[at] - cell_len(cut))
        return padding + cut if HEADERS[at].startswith(">") else cut + padding

    return [" ".join(cell(text, at) for at, text in enumerate(line)).rstrip() for line in lines]


def _top_line_of_levels(view: View) -> str:
    waiting = ", ".join(f"{level}: {_top_number(tokens)}" for level, tokens in view.levels.items())
    return f"tokens waiting by level  {waiting or render.NOTHING}"


def _top_line_of_worker(worker: Any) -> str:
    names = ",".join(worker.handlers) or render.NOTHING
    return (
        f"  {worker.busy:>4}/{worker.slots:<4} {render.clean(worker.name)}  {render.clean(names)}"
    )


def _cut_top_frame(lines: list[str], most: int) -> list[str]:
    """Return so many of the lines; the last of them says how many are left out."""
    if len(lines) <= most or not most:
        return lines[:most]
    return [*lines[: most - 1], f"  and {len(lines) - most + 1:,} more"]


def _cut_top_line(text: str, width: int) -> str:
    """Return the text cut to so many columns; some characters take two."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, max(0, width - 1)) + "…"


def _top_number(number: float) -> str:
    """Return ``950``, ``12k``, ``1.2M``."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            amount = number / (1e3 if unit == "k" else size)
            return f"{amount:.1f}{unit}" if amount < 10 else f"{amount:.0f}{unit}"
    return f"{number:.0f}"


def _top_view_read_once(watch: Watch) -> View:
    """Return a view in which every request was read once."""
    view = watch.look()
    while watch.unread:
        view = watch.look()
    return view


def _top_as_json(view: View, sort: str) -> dict[str, Any]:
    _, key = SORTS[sort]
    return {
        "queue": view.queue,
        "open": view.open,
        "requests": [
            each.status.to_dict() | {"rate_now": each.rate, "eta_now_s": each.eta_s}
            for each in sorted(view.requests, key=key)
        ],
        "levels": {str(level): tokens for level, tokens in view.levels.items()},
        "workers": view.workers,
    }


def _show_top_until_q(watch: Watch, queue: str, sort: str) -> None:
    """Show the queue until somebody types q, once a second and after each key."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    view = View(queue=queue, requests=[], open=0, levels={}, workers=[])
    picture, first, note, look_at = TopFrame([], [], 0), 0, "", 0.0
    with (
        _top_keys_one_by_one() as keys,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            if time.monotonic() >= look_at:
                try:
                    view, note = watch.look(picture.shown), ""
                except (ServerError, Damaged) as error:
                    note = f"- NO NEWS: {error}"
                look_at = time.monotonic() + EVERY_S
            size = console.size
            picture = top_frame(view, sort, size.width, size.height, first, note)
            first = picture.first
            between = Text("\n", no_wrap=True, overflow="crop")
            live.update(between.join(map(_painted_top_line, picture.lines)), refresh=True)
            page = max(1, len(picture.shown))
            for key in keys(max(0.0, look_at - time.monotonic())):
                if key in ("q", "Q", "\x03", ""):
                    return
                if key in SORTS:
                    sort, first = key, 0
                steps = {UP: -1, DOWN: 1, PAGE_UP: -page, PAGE_DOWN: page, HOME: -first}
                first = max(0, first + steps.get(key, 0))


def _painted_top_line(line: str) -> Any:
    """Return the line with the words of a state in their colours; without any under NO_COLOR."""
    from rich.text import Text

    text = Text(line)
    if line.startswith("ID ") or line == "WORKERS":
        text.stylize("bold")
    for word, colour in render.state_colours().items():
        text.highlight_regex(rf"(?<= ){word}(?= )", colour)
    return text


@contextmanager
def _top_keys_one_by_one() -> Generator[Callable[[float], Iterable[str]]]:
    """Let keys be read one by one. The terminal is as before at the end."""
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)

    def read(wait_s: float) -> Iterable[str]:
        ready, _, _ = select.select([number], [], [], wait_s)
        return split_top_keys(os.read(number, 1024).decode(errors="replace")) if ready else []

    try:
        tty.setcbreak(number)
        yield read
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def split_top_keys(typed: str) -> list[str]:
    """Return the keys that were typed; "" if the terminal is gone."""
    if not typed:
        return [""]
    keys, at = [], 0
    known = (UP, DOWN, PAGE_UP, PAGE_DOWN, HOME, *_OTHER_FORMS)
    while at < len(typed):
        key = next((each for each in known if typed.startswith(each, at)), typed[at])
        keys.append(_OTHER_FORMS.get(key, key))
        at += len(key)
    return keys
