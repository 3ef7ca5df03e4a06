"""The ``streamq`` command.

It imports nothing before ``main`` is called: a Ctrl-C that comes before that has a traceback.
"""

import os
import sys

__all__ = ["main"]

_SIGINT = 2


def main() -> None:
    """Run the command that was typed. A signal during its import ends it without a traceback."""
    try:
        _run_typed_command(sys.argv[1:])
    except KeyboardInterrupt as error:
        # TERM and HUP are told as a kind of it (``signals.Terminated``).
        raise SystemExit(128 + getattr(error, "number", _SIGINT)) from None


def _run_typed_command(words: list[str]) -> None:
    if words[:1] == ["_complete"]:
        from .completing import complete

        complete(words[1:])
        return
    from . import signals

    signals.raise_on_term_and_hup(is_worker=words[:1] == ["worker"])
    from .app import main as run

    try:
        run()
    except SystemExit as end:
        if words[:1] == ["run"]:
            _leave_at_once(end.code)
        raise


def _leave_at_once(code: object) -> None:
    """End without taking the interpreter apart, which takes 50 ms: nothing is left to be done.

    A process that is measured ends as usual: the tracer or profiler then writes what it found.
    So does a process that is another program, such as a test that calls ``main``.
    """
    is_measured = sys.gettrace() is not None or sys.getprofile() is not None
    is_other_program = getattr(sys.modules.get("__main__"), "main", None) is not main
    if is_measured or is_other_program or not isinstance(code, int | None):
        return
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):  # the interpreter says so at its end
            return
    os._exit((code or 0) & 0xFF)
