"""The start and the end of a process of a pool: it loads the user's code, and runs its parts."""

import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
from contextlib import suppress

from streamq.app import App
from streamq.errors import StreamqError
from streamq.telemetry import logs
from streamq.worker import program, webhooks
from streamq.worker.channel import Channel, LoadFailed, ProcessConfig, Ready
from streamq.worker.load_app import files_of_user_code, load_app, load_flow_app
from streamq.worker.process import WorkerProcess
from streamq.worker.slot_table import SlotTable
from streamq.worker.tracebacks import users_traceback

log = logging.getLogger(__name__)


def main() -> None:
    """Run a process, started by a ``Spawner`` with CONTROL_FD and TABLE_FD as arguments."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        # Not SIG_IGN: programs that a handler starts would inherit that.
        signal.signal(number, lambda *_: None)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    config = channel.read_config()
    if config is None:
        _leave_process(0)
        return
    if not config.keeps_stdout:
        with suppress(OSError):  # the pool may have been started without a stderr
            os.dup2(2, 1)
    table = SlotTable(int(sys.argv[2]), config.slots)
    logs.send_logs_to_stderr(config.log_level, config.log_format)
    try:
        app = _app_of_process(config)
    except StreamqError as error:
        channel.send(LoadFailed(str(error), ""))
        _leave_process(4)
    except BaseException as error:  # noqa: BLE001  whatever the user's module raises
        message = f"{config.target} cannot be imported: {error!r}"
        channel.send(LoadFailed(message, users_traceback(error)))
        _leave_process(4)
    handlers = app.handlers.values()
    coroutines = [handler.name for handler in handlers if handler.is_async]
    channel.send(Ready([handler.offer for handler in handlers], files_of_user_code(), coroutines))
    # Imported modules stay, so the garbage collector, which was off since the start, need not look
    # at them.
    gc.freeze()
    gc.enable()
    try:
        WorkerProcess(config, app, table, channel).run()
    except BaseException:
        log.exception("the process ends")
        _leave_process(1)
    _leave_process(0)


def _app_of_process(config: ProcessConfig) -> App:
    """Return what the process runs: the user's code, and webhooks if it may post any."""
    if config.argv:
        app = program.app_of_program(config.handler, config.argv, config.max_result)
    elif config.serves:
        app = load_flow_app(config.target, config.serves)
    else:
        app = load_app(config.target, config.handler)
    if config.allow_post:
        app.handlers[webhooks.NAME] = webhooks.Poster(config.allow_post).handler()
    return app


def _leave_process(code: int) -> None:
    """End the process, whatever threads of the user's still run."""
    with suppress(Exception):  # a handler may have closed them
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
