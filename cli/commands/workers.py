"""``streamq workers``."""

from streamq.queue.fleet import WorkerDetails, live_workers

from .. import render
from ..connecting import connected
from ..finding import place_of_queue
from ..shared_options import JsonOption, PrefixOption, QueueOption, UrlOption

#: The most running parts of a worker that the table shows.
RUNNING = 3
HEADERS = (
    "NAME",
    "HOST",
    ">PID",
    "VERSION",
    "HANDLERS",
    ">SLOTS",
    ">UP",
    ">BEAT",
    "RUNNING",
)


def workers(
    queue: QueueOption = "default",
    as_json: JsonOption = False,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """List the live workers, and what each runs now.

    SLOTS are busy/total, UP is the time since the start, BEAT since the last heartbeat: one comes
    within a second when the number of busy slots changes or a handler has run for the first time,
    and every few seconds otherwise. RUNNING
    is request/part, how long it had run at that heartbeat, and how far its handler said that it is
    (Context.progress); the table shows three parts, --json all of them.

        streamq workers --queue default
    """
    place = place_of_queue(url, prefix, queue)
    with connected(place.url, place.prefix) as protocol:
        found = live_workers(protocol, place.queue)
    if as_json:
        render.as_json(found)
        return
    render.data(render.table(HEADERS, map(_row_of_worker, found)))
    if not found:
        render.note(f"no live worker in queue {place.queue}")


def _row_of_worker(worker: WorkerDetails) -> tuple[str, ...]:
    return (
        worker.name,
        worker.host or render.NOTHING,
        f"{worker.pid or render.NOTHING}",
        worker.version or render.NOTHING,
        ",".join(worker.handlers) or render.NOTHING,
        f"{worker.busy}/{worker.slots}",
        render.age(worker.started_ms),
        render.age(worker.beat_ms),
        _parts_that_workers_run(worker),
    )


def _parts_that_workers_run(worker: WorkerDetails) -> str:
    oldest = sorted(worker.running, key=lambda part: part.since_ms)
    # At the heartbeat, by the worker's clock: a short part may have ended long ago by now.
    shown = [
        f"{part.request}/{part.part} {render.span(worker.beat_ms - part.since_ms)}"
        + (f" {part.progress} %" if part.progress else "")
        for part in oldest[:RUNNING]
    ]
    if len(oldest) > RUNNING:
        shown.append(f"{len(oldest) - RUNNING} more")
    return ", ".join(shown) or render.NOTHING
