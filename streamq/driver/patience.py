"""Waiting for a server that fails over, reads its data, or is away for a moment."""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

from redis import exceptions as driver

from streamq.driver.errors import our_error_of_driver
from streamq.errors import ServerBusy, ServerUnreachable

#: Ask a server that is not ready every 0.2 s, and tell the user after 1 s that we wait for it.
_ASK_AGAIN_S = 0.2
_SAY_AFTER_S = 1.0


class _Block(NamedTuple):
    patience_s: float
    say: Callable[[str], object]


class _OfThread(threading.local):
    """The block that one thread has entered. Each thread begins with these values."""

    block: _Block | None = None
    is_asking = False


class Patience:
    """How long the calls of a connection are repeated while its server is not ready.

    A thread is patient while it is inside of a ``block``; other threads are not. Blocks nest: the
    innermost one counts.
    """

    def __init__(self, where: str, *, has_answered: bool) -> None:
        """``has_answered``: a server has answered before, so one that is away may come back."""
        self._where = where
        self._has_answered = has_answered
        self._here = _OfThread()

    @contextmanager
    def block(self, patience_s: float, say: Callable[[str], object]) -> Generator[None]:
        """Repeat each call for up to ``patience_s``; ``say`` gets a sentence after 1 s."""
        outer = self._here.block
        self._here.block = _Block(patience_s, say)
        try:
            yield
        finally:
            self._here.block = outer

    @property
    def is_wanted(self) -> bool:
        """Whether this thread is inside of a block."""
        return self._here.block is not None

    def ask(self, call: Callable[..., Any], *words: Any, **options: Any) -> Any:
        """Make a call; inside a block, repeat it until a server answers.

        A call that is made by another call is not repeated itself: the outer one is.
        """
        here = self._here
        if here.block is None or here.is_asking:
            return call(*words, **options)
        here.is_asking = True
        try:
            return self._insist(here.block, lambda: call(*words, **options))
        finally:
            here.is_asking = False

    def _insist(self, block: _Block, call: Callable[[], Any]) -> Any:
        begun = time.monotonic()
        is_said = False
        while True:
            try:
                reply = call()
            except (driver.RedisError, driver.RedisClusterException, OSError) as error:
                meant = our_error_of_driver(error, self._where)
                # A server that never answered may not exist: it is not waited for.
                passing = (ServerBusy, ServerUnreachable) if self._has_answered else ServerBusy
                waited_s = time.monotonic() - begun
                if waited_s >= block.patience_s or not isinstance(meant, passing):
                    raise
                if waited_s >= _SAY_AFTER_S and not is_said:
                    block.say(f"{meant}; waiting for it")
                    is_said = True
                time.sleep(_ASK_AGAIN_S)
            else:
                self._has_answered = True
                return reply
