"""The ``streamq`` command."""

import sys

from . import signals

__all__ = ["main"]


def main() -> None:
    """Run the command that was typed. A signal during its import ends it without a traceback."""
    if sys.argv[1:2] == ["_complete"]:
        from .completing import complete

        complete(sys.argv[2:])
        return
    try:
        signals.heed(is_worker=sys.argv[1:2] == ["worker"])
        from .app import main as run

        run()
    except KeyboardInterrupt as error:
        raise SystemExit(signals.exit_code(error)) from None
