"""The session of one worker on a stream, which WebSocket or gRPC carries.

Work, reports and signs of life share the stream: a worker that does not beat on it is not alive.
Parts go out only for slots that the worker has said are free. When a stream breaks without a word,
its leases end after a few seconds, unless the worker comes back before (``courier.py``).
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import UNSET

from streamq.errors import InvalidValue, ServerError, StreamqError
from streamq.gateway.desk import MOST_BEAT_MS, Desk, Handed
from streamq.gateway.messages import Beat, Leave, Report, Verdict
from streamq.gateway.problems import Problem, problem_of, problem_of_too_many_takes
from streamq.gateway.roles import Caller, Role
from streamq.gateway.session_messages import (
    Bye,
    FromWorker,
    GiveBack,
    GoAway,
    Hello,
    Pause,
    ToWorker,
    Trouble,
    Want,
    Welcome,
)
from streamq.gateway.ticket import BadTicket, Ticket

log = logging.getLogger(__name__)

#: How long the gateway waits for the first message of a worker, and then for each next one.
HELLO_S = 10.0
SILENCE_S = 3 * MOST_BEAT_MS / 1e3 + 1.0
#: How long sending a message may take. Then the worker does not read, and its stream is cut.
SEND_S = 30.0
#: How long a worker may stay that was asked to go.
GO_WITHIN_MS = 5_000
#: After this time a worker is asked to open another stream, so that new gateways get their share of
#: workers.
AGE_S = (30 * 60.0, 60 * 60.0)
PAUSE_S = 1.0

Receive = Callable[[], Awaitable[FromWorker | None]]
Send = Callable[[ToWorker], Awaitable[None]]


class Sessions:
    """All open sessions of a gateway."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._open: set[Session] = set()
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    async def serve(self, caller: Caller, receive: Receive, send: Send) -> None:
        """Serve one stream until it ends. ``receive`` returns None when it has ended."""
        caller.check_role(Role.WORKER, "a session")
        if self._counts[caller.name] >= caller.streams:
            raise problem_of_too_many_takes(
                f"the key {caller.name} has {caller.streams} streams open already"
            )
        session = Session(self._desk, caller, receive, send)
        self._open.add(session)
        self._counts[caller.name] += 1
        try:
            await session.run()
        finally:
            self._open.discard(session)
            self._counts[caller.name] -= 1

    async def close(self, within_s: float) -> None:
        """Ask all workers to go to another gateway, and wait for that: this one stops."""
        for session in list(self._open):
            session.ask_to_go()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._open:
                    await asyncio.sleep(0.05)


class Session:
    """One stream."""

    def __init__(self, desk: Desk, caller: Caller, receive: Receive, send: Send) -> None:
        self._desk = desk
        self._caller = caller
        self._receive = receive
        self._send_now = send
        self._sending = asyncio.Lock()
        #: Tickets that the worker holds, each with the part that runs, and how often in a row the
        #: worker said so.
        self._held: dict[str, tuple[Ticket, int | None]] = {}
        self._slow: Counter[str] = Counter()
        #: What the worker calls itself.
        self._name = ""
        self._slots = 0
        #: Done when a slot may be free again, while that is waited for.
        self._changed: asyncio.Future[None] | None = None
        self._goes_at = time.monotonic() + random.uniform(*AGE_S)
        self._is_leaving = False
        self._is_polite = False
        self._listening: asyncio.Task[Any] | None = None

    async def run(self) -> None:
        """Serve the worker until it goes, or its stream breaks."""
        async with asyncio.timeout(HELLO_S):
            first = await self._receive()
        if first is None:
            return
        if first.hello is UNSET:
            raise InvalidValue("the first message is hello")
        handing: asyncio.Task[None] | None = None
        try:
            await self._begin(first.seq, first.hello)
            handing = asyncio.ensure_future(self._hand_out(first.hello))
            handing.add_done_callback(self._end_if_failed)
            self._listening = asyncio.current_task()
            await self._listen()
        except asyncio.CancelledError:
            if handing is None or not _has_session_failed(handing):
                raise
            task = asyncio.current_task()
            assert task
            task.uncancel()
            await handing  # raises that the worker does not read
        finally:
            self._listening = None
            self._is_leaving = True
            if handing:
                handing.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await handing
            if not self._is_polite:
                self._desk.courier.broke(self._held)

    def _end_if_failed(self, handing: asyncio.Task[None]) -> None:
        """Listen no more if nothing can be handed out: the worker does not read."""
        if _has_session_failed(handing) and self._listening:
            self._listening.cancel()

    def ask_to_go(self) -> None:
        """Ask the worker to open another stream elsewhere, and hand out nothing more."""
        if not self._is_leaving:
            self._is_leaving = True
            asyncio.ensure_future(self._say(ToWorker(go_away=GoAway(GO_WITHIN_MS))))  # noqa: RUF006

    async def _begin(self, seq: int, hello: Hello) -> None:
        self._desk.check_queue(self._caller, hello.queue)
        try:
            verdict = await self._desk.beat(self._caller, Beat(hello.holding))
        except BadTicket:
            verdict = Verdict([held.ticket for held in hello.holding])
        for held in hello.holding:
            if held.ticket not in verdict.unwanted:
                self._held[held.ticket] = (self._desk.open(self._caller, held.ticket), held.part)
        self._slots = hello.slots
        beat_ms = min(hello.lease_ms // 4, MOST_BEAT_MS)
        welcome = Welcome(beat_ms=beat_ms, lease_ms=hello.lease_ms, unwanted=verdict.unwanted)
        await self._say(ToWorker(re=seq, welcome=welcome))

    async def _hand_out(self, hello: Hello) -> None:
        """Take leases while the worker has free slots."""
        ask = hello.ask()
        ask.name = self._name = hello.name or f"stream {id(self):x}"
        while not self._is_leaving:
            if len(self._held) >= self._slots:
                self._changed = asyncio.get_running_loop().create_future()
                await self._changed
                continue
            try:
                handed = await self._desk.take(self._caller, ask)
            except ServerError:
                await self._say(ToWorker(pause=Pause(round(PAUSE_S * 1e3))))
                await asyncio.sleep(PAUSE_S)
                continue
            except (Problem, StreamqError) as error:
                self._desk.check_again(self._caller)
                await self._say(ToWorker(error=_session_trouble_of_error(error)))
                await asyncio.sleep(PAUSE_S)
                continue
            if handed.granted:
                await self._grant(handed)
            elif self._desk.is_stopping:
                return

    async def _grant(self, handed: Handed) -> None:
        assert handed.granted
        assert handed.ticket
        if len(self._held) >= self._slots or self._is_leaving:
            handed.undo()  # the worker took a slot back meanwhile
            return
        self._held[handed.granted.ticket] = (handed.ticket, None)
        await self._say(ToWorker(grant=handed.granted))

    async def _listen(self) -> None:
        while True:
            async with asyncio.timeout(SILENCE_S):
                message = await self._receive()
            if message is None:
                return
            self._desk.check_again(self._caller)
            if time.monotonic() > self._goes_at:
                self.ask_to_go()
            try:
                if await self._heed(message):
                    return
            except (Problem, StreamqError) as error:
                await self._say(ToWorker(re=message.seq, error=_session_trouble_of_error(error)))

    async def _heed(self, message: FromWorker) -> bool:
        """Do what a message says. Returns whether it was the last."""
        if message.report is not UNSET:
            await self._report(message.seq, message.report)
        elif message.beat is not UNSET:
            await self._beat(message.seq, message.beat)
        elif isinstance(message.want, Want):
            self._slots = message.want.slots
            self._note_change()
        elif isinstance(message.bye, Bye):
            await self._leave(message.bye)
            return True
        else:
            raise InvalidValue("a message is one of want, report, beat and bye")
        return False

    async def _report(self, seq: int, report: Report) -> None:
        if report.next is not None and (self._is_leaving or len(self._held) > self._slots):
            report.next = None
        if report.next is not None:
            report.next.handlers = []  # more parts of this lease, but no other lease
            report.next.name = self._name
        try:
            handed = await self._desk.report(self._caller, report)
        except BadTicket:  # it is of no use any more, and its slot is free
            self._held.pop(report.ticket, None)
            self._note_change()
            raise
        self._held.pop(report.ticket, None)
        self._slow.pop(report.ticket, None)
        if handed.granted and handed.ticket:
            self._held[handed.granted.ticket] = (handed.ticket, None)
        self._note_change()
        await self._say(ToWorker(re=seq, grant=handed.granted or UNSET))

    async def _beat(self, seq: int, beat: Beat) -> None:
        verdict = await self._desk.beat(self._caller, beat)
        for held in beat.tickets:
            if held.ticket in self._held and held.ticket not in verdict.unwanted:
                await self._note(held.ticket, held.part)
        for text in verdict.unwanted:
            self._held.pop(text, None)
        self._note_change()
        await self._say(ToWorker(re=seq, verdict=verdict))

    async def _note(self, text: str, part: int | None) -> None:
        """Note which part runs. If it takes long, ask for the parts behind it."""
        ticket, before = self._held[text]
        self._held[text] = (ticket, part)
        self._slow[text] = self._slow[text] + 1 if part is not None and part == before else 0
        if self._slow[text] == 1 and ticket.parts.numbers()[-1:] != [part]:
            await self._say(ToWorker(give_back=GiveBack(text)))

    def _note_change(self) -> None:
        if self._changed and not self._changed.done():
            self._changed.set_result(None)

    async def _leave(self, bye: Bye) -> None:
        # The parts that this worker gives back are for others: its free slots get no more.
        self._is_leaving = True
        tickets = list(dict.fromkeys([*bye.tickets, *self._held]))
        await self._desk.leave(self._caller, Leave(tickets))
        self._is_polite = True

    async def _say(self, message: ToWorker) -> None:
        async with asyncio.timeout(SEND_S), self._sending:
            await self._send_now(message)


def _has_session_failed(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None


def _session_trouble_of_error(error: Problem | StreamqError) -> Trouble:
    problem = error if isinstance(error, Problem) else problem_of(error)
    return Trouble(problem.status, problem.code, problem.title, problem.detail or problem.title)


def encode_session_message(message: ToWorker) -> bytes:
    """Return a message as JSON."""
    return msgspec.json.encode(message)
