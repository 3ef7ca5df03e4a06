"""A gateway that listens, and calls of it."""

import http.client
import json
import re
import signal
import ssl
import subprocess
import sys
import threading
from typing import Any, NamedTuple

from tests.support.command import COMMAND, environment
from tests.support.waiting import wait_until

LOCAL = "127.0.0.1:0"


class Reply(NamedTuple):
    """What a call was answered."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.text.splitlines()]


class Gate:
    """The command ``streamq serve`` on one queue, and calls of it."""

    def __init__(self, url: str, queue: str, *words: str, hasty: str = "") -> None:
        """``hasty``: statements in Python that shorten what the gateway waits for."""
        self.queue = queue
        #: Headers of every call, and how calls are encrypted.
        self.headers: dict[str, str] = {}
        self.tls: ssl.SSLContext | None = None
        program = COMMAND
        if hasty:
            program = [sys.executable, "-c", f"{hasty}; from cli.app import main; main()"]
        command = [*program, "serve", "--url", url, "--queue", queue]
        if "--listen" not in words:
            command += ["--listen", LOCAL]
        self.process = subprocess.Popen(
            [*command, *words], env=environment(), stderr=subprocess.PIPE, text=True
        )
        self._said: list[str] = []
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()
        try:
            self.url = wait_until(self._address, 60)
        except BaseException:
            self.end()
            raise
        self.port = int(self.url.rpartition(":")[2])

    def _listen(self) -> None:
        assert self.process.stderr
        with self.process.stderr as lines:
            for line in lines:
                self._said.append(line)

    @property
    def log(self) -> str:
        return "".join(self._said)

    def _address(self) -> str:
        found = re.search(r"serving at (http\S+)", self.log)
        if not found and self.process.poll() is not None:
            raise AssertionError(self.log)
        return found[1] if found else ""

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout: float = 60,
    ) -> Reply:
        """Make one call on a connection of its own. Bytes are sent as they are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        if self.tls:
            connection = http.client.HTTPSConnection(
                "127.0.0.1", self.port, timeout=timeout, context=self.tls
            )
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body)
            connection.request(method, path, data, self.headers | (headers or {}))
            answer = connection.getresponse()
            text = answer.read().decode()
            return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, text)
        finally:
            connection.close()

    def post(self, path: str, body: Any, **more: Any) -> Reply:
        return self.call("POST", path, body, **more)

    def get(self, path: str, **more: Any) -> Reply:
        return self.call("GET", path, **more)

    def submit(self, parts: list[Any], **options: Any) -> str:
        """Make a request, and return its id."""
        body = {"handler": "h", "queue": self.queue, "parts": parts, **options}
        reply = self.post("/v1/requests", body)
        assert reply.status == 201, reply
        return str(reply.json["id"])

    def ask(self, **changes: Any) -> dict[str, Any]:
        return {"queue": self.queue, "handlers": ["h"], "wait_s": 10, **changes}

    def take(self, **changes: Any) -> Reply:
        return self.post("/v1/take", self.ask(**changes))

    def stop(self) -> int:
        """Stop it politely, and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()


def shouted(granted: dict[str, Any]) -> list[dict[str, Any]]:
    """What a worker reports of parts that are text, or JSON that is text."""
    return [
        {"part": part["number"], "result": {"text": (part.get("text") or part["json"]).upper()}}
        for part in granted["parts"]
    ]
