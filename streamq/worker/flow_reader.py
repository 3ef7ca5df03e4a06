"""Reads the flow that a target names (``module:flow``), in a process of its own.

The parent of a pool never imports the user's code. So another process imports it, writes down what
stages the flow has, and ends. Needs no redis-py.
"""

import os
import subprocess
import sys
from contextlib import suppress

import msgspec

from streamq.errors import AppLoadError, InvalidValue, StreamqError
from streamq.flows.flow import Flow, Stage
from streamq.worker.load_app import load_flow, load_flow_app
from streamq.worker.tracebacks import users_traceback

_BEGIN = "from streamq.worker.flow_reader import main; main()"


class _Told(msgspec.Struct):
    """What the process tells of the flow, or why it cannot be loaded."""

    name: str = ""
    stages: list[Stage] = []
    message: str = ""
    trace: str = ""
    is_invalid: bool = False


def read_flow_apart(target: str, *, has_handlers: bool) -> Flow:
    """Return the flow that a target names, without importing the user's code here.

    ``has_handlers``: all handlers that it names have to be there, too.

    Raises:
        InvalidValue: there can be no such flow.
        AppLoadError: there is no such module or name, or the module cannot be imported.
    """
    wanted = ["handlers"] if has_handlers else []
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as source:
        try:
            # What the module prints goes to stderr: standard output may be that of the results.
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BEGIN, str(writer), target, *wanted],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(writer,),
            )
        finally:
            os.close(writer)
        text = source.read()
        code = process.wait()
    try:
        told = msgspec.json.decode(text, type=_Told)
    except msgspec.DecodeError:
        raise AppLoadError(f"{target}: its process ended with {code} while it loaded") from None
    if told.is_invalid:
        raise InvalidValue(told.message)
    if told.message:
        raise AppLoadError(told.message, told.trace)
    return Flow(told.name, told.stages)


def main() -> None:
    """Read the flow and write it to a file descriptor; both are arguments of the process."""
    writer, target, *wanted = sys.argv[1:]
    try:
        found = load_flow(target)
        if wanted:
            load_flow_app(target)
        told = _Told(found.name, list(found.stages))
    except InvalidValue as error:
        told = _Told(message=str(error), is_invalid=True)
    except StreamqError as error:
        told = _Told(message=str(error))
    except BaseException as error:  # noqa: BLE001  whatever the user's module raises
        message = f"{target} cannot be imported: {error!r}"
        told = _Told(message=message, trace=users_traceback(error))
    with suppress(Exception):  # the module may have closed them
        sys.stdout.flush()
        sys.stderr.flush()
    with os.fdopen(int(writer), "wb") as sink:
        sink.write(msgspec.json.encode(told))
    os._exit(0)
