"""Calls on connections that are kept."""

import os
import signal
import socket
import socketserver
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import hiredis
import pytest
from redis import exceptions as driver

from streamq import (
    Client,
    Connection,
    Protocol,
    ServerError,
    ServerUnreachable,
)
from streamq.driver.lanes import Lane, packed_command
from streamq.protocol.replies import Token, Tokens
from streamq.servers.launcher import LOOPBACK
from streamq.servers.local import LocalServer
from tests.driver.common import connected, sentinel_for, with_login
from tests.support.waiting import allowed_s, wait_until


class HurryError(BaseException):
    """Somebody is in a hurry."""


@contextmanager
def _taking(protocol: Protocol, queue: str) -> Generator[list[object]]:
    """A take of half a minute in a thread; what it came to."""
    came: list[object] = []

    def take() -> None:
        try:
            came.append(protocol.take(queue, ("h",), 30))
        except ServerError as error:
            came.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    yield came
    thread.join()


def _end_wait(protocol: Protocol, taken: list[object]) -> bool:
    protocol.connection.wake()
    return bool(taken)


def _left(connection: Connection, taken: list[object]) -> bool:
    connection.check_waits()
    return bool(taken)


class TestLanes:
    """Calls on connections that are kept: each gets its own answer, or an error."""

    def test_call_that_is_interrupted_leaves_no_answer_behind(self, server: LocalServer) -> None:
        def interrupt(*_: Any) -> None:
            raise HurryError

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            with connected(server.url) as connection:
                connection.call_once("ECHO", "a")
                signal.setitimer(signal.ITIMER_REAL, 0.2)
                with pytest.raises(HurryError):
                    connection.pop(("never",), 1)

                assert connection.call_once("ECHO", "b") == b"b"
                assert connection.pop(("never",), 0.01) is None
        finally:
            signal.signal(signal.SIGALRM, before)

    def test_wait_can_be_ended_and_loses_nothing(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        with _taking(protocol, queue) as taken:
            wait_until(lambda: _end_wait(protocol, taken))

        assert taken == [None]
        # The connection is whole: what comes next is the answer to the next call.
        protocol.mint(queue, request_id, Tokens(1, "h:50"))
        assert protocol.take(queue, ("h",), 1) == Token(request_id, "h", 50)

    def test_wait_that_may_not_be_ended_is_hung_up(self, server: LocalServer, admin: Any) -> None:
        user = ("on", ">secret", "~*", "+@all", "-client|unblock")
        admin.execute_command("ACL", "SETUSER", "waits", *user)
        with connected(with_login(server.url, "waits:secret")) as connection:
            protocol = Protocol(connection)
            with _taking(protocol, "q") as taken:
                wait_until(lambda: _end_wait(protocol, taken))

            assert [type(each) for each in taken] == [ServerUnreachable]
            assert protocol.take("q", ("h",), 0.01) is None

    def test_wait_at_a_server_that_hangs_is_left(self) -> None:
        with LocalServer.start(port=0) as server, connected(server.url) as connection:
            protocol = Protocol(connection)
            with _taking(protocol, "q") as taken:
                wait_until(lambda: any(each.blocked for each in connection._lanes.values()))
                connection.check_waits()
                assert taken == []
                os.kill(server.pid, signal.SIGSTOP)
                begun = time.monotonic()
                try:
                    wait_until(lambda: _left(connection, taken), 20)
                finally:
                    os.kill(server.pid, signal.SIGCONT)
            assert [type(each) for each in taken] == [ServerUnreachable]
            assert time.monotonic() - begun < allowed_s(9)

    def test_refusal_is_the_answer_to_its_own_call(self, server: LocalServer) -> None:
        with connected(server.url) as connection:
            answers = connection.call_all([("ECHO", "a"), ("NONSENSE",), ("ECHO", "b")])

            assert [answers[0], answers[2]] == [b"a", b"b"]
            assert isinstance(answers[1], driver.ResponseError)
            with pytest.raises(driver.ResponseError):
                connection.call("NONSENSE")
            assert connection.call("ECHO", "c") == b"c"

    @pytest.mark.parametrize("method", ["call", "call_once"])
    def test_connection_that_the_server_has_closed_is_not_used(
        self, server: LocalServer, admin: Any, method: str
    ) -> None:
        with connected(server.url) as connection:
            call = getattr(connection, method)
            call("ECHO", "a")
            admin.client_kill_filter(_type="normal", skipme=True)

            assert call("ECHO", "b") == b"b"

    def test_connection_that_the_server_closes_just_then_is_renewed(
        self, server: LocalServer, admin: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with connected(server.url) as connection:
            connection.call_once("ECHO", "a")
            admin.client_kill_filter(_type="normal", skipme=True)
            # It was closed after the look at it, so sending is what finds out.
            monkeypatch.setattr(Lane, "is_usable", lambda _: True)
            lane = connection._lanes_for(1, ("ECHO",))._free[0]
            lane._socket.shutdown(socket.SHUT_WR)

            assert connection.call_once("ECHO", "b") == b"b"

    def test_threads_have_lanes_of_their_own(self, server: LocalServer) -> None:
        found = []

        def echo(word: str) -> None:
            for _ in range(100):
                found.append((word, connection.call("ECHO", word)))

        with connected(server.url) as connection:
            threads = [threading.Thread(target=echo, args=(str(n),)) for n in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        assert len(found) == 800
        assert all(word.encode() == answer for word, answer in found)

    def test_lanes_that_are_kept_shut_nobody_out(self, server: LocalServer, admin: Any) -> None:
        with connected(server.url) as connection:
            admin.client_pause(500)
            threads = [threading.Thread(target=connection.call, args=("PING",)) for _ in range(120)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

            assert connection.redis.ping()

    def test_copy_of_the_process_has_lanes_of_its_own(self, server: LocalServer) -> None:
        with connected(server.url) as connection:
            connection.call("ECHO", "a")
            mine = connection.call("CLIENT", "ID")
            reader, writer = os.pipe()
            if (pid := os.fork()) == 0:
                os.write(writer, str(connection.call("CLIENT", "ID")).encode())
                os._exit(0)
            os.waitpid(pid, 0)

            assert int(os.read(reader, 20)) != mine
            assert connection.call("CLIENT", "ID") == mine
            os.close(reader)
            os.close(writer)

    def test_lane_to_a_former_primary_is_left(self, server: LocalServer) -> None:
        with LocalServer.start(port=0) as other, sentinel_for(server, "main") as address:
            host, port = other.url.rpartition("/")[2].split(":")
            with (
                connected(f"redis+sentinel://{address}/main") as connection,
                connected(f"redis://{address}") as sentinel,
            ):
                before = connection.call("CONFIG", "GET", "port")
                sentinel.redis.execute_command("SENTINEL REMOVE", "main")
                sentinel.redis.execute_command("SENTINEL MONITOR", "main", host, port, 1)
                connection.redis.ping()

                assert (
                    connection.call("CONFIG", "GET", "port") == [b"port", port.encode()] != before
                )

    def test_lane_to_one_that_is_no_primary_any_more_is_left(self) -> None:
        with (
            LocalServer.start(port=0) as former,
            LocalServer.start(port=0) as other,
            sentinel_for(former, "main") as address,
            connected(f"redis+sentinel://{address}/main") as connection,
            connected(f"redis://{address}") as sentinel,
            connected(former.url) as demoted,
        ):
            host, port = other.url.rpartition("/")[2].split(":")
            connection.call("SET", "a", "1")
            connection.pop(("never",), 0.01)
            demoted.redis.execute_command("REPLICAOF", host, port)
            sentinel.redis.execute_command("SENTINEL REMOVE", "main")
            sentinel.redis.execute_command("SENTINEL MONITOR", "main", host, port, 1)

            assert connection.call("SET", "a", "2")
            assert connection.pop(("never",), 0.01) is None
            assert connection.call("CONFIG", "GET", "port")[1] == port.encode()

    def test_limit_of_the_drivers_pool_does_not_count(self, server: LocalServer) -> None:
        with connected(f"{server.url}?max_connections=1") as connection:
            connection.call("ECHO", "a")

            assert connection.redis.ping()

    def test_nonsense_in_place_of_several_answers(self) -> None:
        with nonsense() as url, Client(url) as client, pytest.raises(ServerUnreachable):
            client.submit([1], handler="h")


@contextmanager
def nonsense() -> Generator[str]:
    """Where a PING is answered, and all else with what is no answer."""

    class Answer(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while heard := self.request.recv(65_536):
                self.request.sendall(b"+OK\r\n" if b"EVALSHA" not in heard else b"?\r\n")

    with socketserver.ThreadingTCPServer((LOOPBACK, 0), Answer) as speaker:
        speaker.daemon_threads = True
        threading.Thread(target=speaker.serve_forever).start()
        yield f"redis://{LOOPBACK}:{speaker.server_address[1]}"
        speaker.shutdown()


@pytest.mark.parametrize("large", [(), (2,), (3,), (2, 3), (2, 5), (4, 5)], ids=str)
def test_large_words_are_sent_as_all_others(large: tuple[int, ...]) -> None:
    words: tuple[Any, ...] = ("EVALSHA", "ab", 7, b"x\r\ny", 1.5, "\xe9")
    words = tuple(b"\r\n" * 2**17 if place in large else word for place, word in enumerate(words))

    assert b"".join(packed_command(words)) == hiredis.pack_command(words)
