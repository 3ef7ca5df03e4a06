"""A worker for Python programs: what ``streamq worker`` runs."""

import logging
import threading
from collections.abc import Iterable

from streamq.errors import InvalidValue, SettingsError
from streamq.protocol.connecting import connected_protocol
from streamq.settings import Settings, url_with_login
from streamq.telemetry import logs
from streamq.worker.options import ALL_LEVELS, LARGEST_RESULT, describe_pool, describe_process
from streamq.worker.pool import Pool
from streamq.worker.service import serve_pool
from streamq.worker.spawning import Spawner

log = logging.getLogger(__name__)


class Worker:
    """Run the handlers of an app in a pool of processes, until it is told to stop.

    Options have the names, the settings and the defaults of ``streamq worker``: those that are
    None come from the settings, such as ``STREAMQ_PROCESSES`` or the file ``streamq.toml``.

    Example:
        Worker("tasks:app", processes=4, concurrency=8).run()
    """

    def __init__(  # noqa: PLR0913  the options of a worker are many and flat
        self,
        app: str = "",
        url: str | None = None,
        *,
        exec: str = "",
        handler: str = "",
        processes: int | None = None,
        concurrency: int | None = None,
        queue: str | None = None,
        levels: str = ALL_LEVELS,
        burst: bool = False,
        max_idle: str | float | None = None,
        max_parts: int = 0,
        max_memory: str | int | None = None,
        max_result: str | int = LARGEST_RESULT,
        grace: str | float | None = None,
        cancel_grace: str | float = "10s",
        quantum: str | float = "50ms",
        lease: str | float | None = None,
        reload: bool = False,
        health_port: str | None = None,
        allow_read: Iterable[str] = (),
        allow_post: Iterable[str] = (),
        spool: Iterable[str] = (),
        prefix: str | None = None,
        insecure: bool | None = None,
    ) -> None:
        """Describe the worker; nothing is started.

        ``app`` names an app, ``package.module:app`` or ``file.py:app``: each process imports it
        anew. Instead ``exec`` is a program to be run with each part, as a shell would write
        it, and ``handler`` the name that requests call it by.

        Raises:
            InvalidValue: an option that cannot be.
            SettingsError: no server is named.
        """
        settings = Settings.from_env()
        address = url_with_login(url or settings.url, settings)
        if not address:
            raise SettingsError("which server? Give a URL, or set STREAMQ_URL")
        if bool(app) == bool(exec) or bool(exec) != bool(handler):
            raise InvalidValue("give an app, or exec and handler")
        slots = settings.concurrency if concurrency is None else concurrency
        self._config = describe_process(
            app,
            url=address,
            prefix=prefix or settings.prefix,
            command=exec,
            handler=handler,
            queue=queue or settings.queue,
            concurrency=slots,
            levels=levels,
            quantum=quantum,
            lease=lease,
            max_result=max_result,
            allow_read=allow_read,
            allow_post=allow_post,
            spool=spool,
            log_level=settings.log_level,
            log_format=logs.log_style(settings.log_format),
        )
        self._options = describe_pool(
            processes=settings.processes if processes is None else processes,
            concurrency=slots,
            burst=burst,
            max_idle=max_idle,
            max_parts=max_parts,
            max_memory=max_memory,
            grace=settings.grace if grace is None else grace,
            cancel_grace=cancel_grace,
            reload=reload,
        )
        self._levels = levels
        self._health_port = settings.health_port if health_port is None else health_port
        self._insecure = settings.insecure if insecure is None else insecure
        self._pool: Pool | None = None
        self._is_stopped = threading.Event()

    def run(self) -> int:
        """Run parts until told to stop, or with ``burst`` until nothing is left to do.

        In the main thread TERM and Ctrl-C stop it politely, as they stop the command; in another
        thread ``stop`` does. Returns 0, or 128 and the signal that ended it before its parts had
        ended.

        Raises:
            AppLoadError: the app cannot be imported.
            ServerError: the server cannot be used.
        """
        config, options = self._config, self._options
        with (
            Spawner(config.slots, options.processes) as spawner,
            connected_protocol(
                config.url,
                config.prefix,
                is_insecure=self._insecure,
                say=log.warning,
                warn=log.warning,
                is_patient=False,
            ) as protocol,
        ):
            return serve_pool(
                protocol,
                config,
                options,
                spawner,
                levels=self._levels,
                health_port=self._health_port,
                started=self._started,
            )

    def _started(self, pool: Pool) -> None:
        self._pool = pool
        if self._is_stopped.is_set():
            pool.stop()

    def stop(self) -> None:
        """Stop it from another thread, as TERM does: what runs may end, the rest is handed back."""
        self._is_stopped.set()
        if self._pool:
            self._pool.stop()
