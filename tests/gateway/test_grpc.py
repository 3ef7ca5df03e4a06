"""The gateway over gRPC, called with a stub that is generated from the proto."""

import json
import queue as queues
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from streamq import Client
from streamq.gateway import keys
from streamq.gateway.roles import Role
from tests.conftest import ONE_KIND
from tests.gateway.common import Gate
from tests.support.waiting import allowed_s, wait_until

grpc = pytest.importorskip("grpc")
pb = pytest.importorskip("streamq.gateway.streamq_pb2")
pytestmark = ONE_KIND
PROTO = Path(__file__).parents[2] / "proto" / "streamq.proto"
Serve = Callable[..., Gate]


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the generator makes of the proto today."""
    pytest.importorskip("grpc_tools")
    folder = tmp_path_factory.mktemp("stubs")
    words = [f"-I{PROTO.parent}", f"--python_out={folder}", f"--grpc_python_out={folder}"]
    command = [sys.executable, "-m", "grpc_tools.protoc", *words, str(PROTO)]
    subprocess.run(command, check=True, capture_output=True)
    made = (folder / "streamq_pb2_grpc.py").read_text()
    found: dict[str, Any] = {}
    made = made.replace("import streamq_pb2", "from streamq.gateway import streamq_pb2")
    exec(compile(made, "streamq_pb2_grpc.py", "exec"), found)
    kept = (PROTO.parents[1] / "streamq" / "gateway" / "streamq_pb2.py").read_text()
    found["is_current"] = (folder / "streamq_pb2.py").read_text() == kept
    return found


def port_of(gate: Gate) -> int:
    def port() -> int:
        for line in gate.log.splitlines():
            if line.endswith("(gRPC)"):
                return int(line.split()[-2].rpartition(":")[2])
        return 0

    return wait_until(port, 60)


@pytest.fixture
def gate(serve: Serve) -> Gate:
    return serve("--grpc", "127.0.0.1:0")


@pytest.fixture
def channel(gate: Gate) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{port_of(gate)}") as channel:
        yield channel


def who(gate: Gate, **more: Any) -> Any:
    return pb.Hello(queue=gate.queue, handlers=[pb.Offer(name="h")], **more)


def test_generated_code_is_that_of_the_proto(stubs: Any, gate: Gate) -> None:
    assert stubs["is_current"], "run make proto"
    assert gate.get("/v1/streamq.proto").text == PROTO.read_text()


def test_whole_job_by_single_calls(gate: Gate, channel: Any, stubs: Any) -> None:
    work, requests = stubs["WorkStub"](channel), stubs["RequestsStub"](channel)
    parts = [pb.Value(text="a"), pb.Value(data=b"\xff"), pb.Value(json='{"n":1}')]
    new = pb.NewRequest(
        id=f"job-{gate.queue}", handler="h", queue=gate.queue, parts=parts, options='{"limit":1}'
    )
    assert requests.Submit(new).total == 3
    assert requests.Submit(new).total == 3
    seen, results = [], [pb.Value(text="A"), pb.Value(data=b"\xfe"), pb.Value(json="[2]")]
    for _ in range(3):
        grant = work.Take(pb.Ask(who=who(gate), wait_ms=20_000))
        (part,) = grant.parts
        seen.append(part.payload)
        held = pb.Held(ticket=grant.ticket, part=part.number)
        assert not work.Beat(pb.BeatMessage(held=[held])).unwanted
        done = pb.Result(part=part.number, value=results[part.number - 1])
        assert work.Report(pb.ReportMessage(ticket=grant.ticket, done=[done])).counted == 1
    assert seen == parts
    *_, last = requests.Watch(pb.RequestId(id=new.id))
    assert (last.state, last.done) == ("done", 3)
    *found, end = requests.Results(pb.ResultsAsk(id=new.id, follow=True))
    assert [each.values[0] for each in found] == results
    assert (end.next, end.is_over) == (4, True)


@pytest.mark.long
def test_session_and_the_fuse(gate: Gate, channel: Any, stubs: Any, client: Client) -> None:
    request_id = gate.submit(["a", "b"], limit=2)
    said: queues.Queue[Any] = queues.Queue()
    stream = stubs["WorkStub"](channel).Session(iter(said.get, None))
    said.put(pb.FromWorker(seq=1, hello=who(gate, slots=2)))
    assert next(stream).welcome.beat_ms == 3_000
    grants = [next(stream).grant, next(stream).grant]
    report = pb.ReportMessage(
        ticket=grants[0].ticket, done=[pb.Result(part=grants[0].parts[0].number)]
    )
    said.put(pb.FromWorker(seq=2, report=report))
    answer = next(stream)
    assert (answer.re, answer.grant.counted) == (2, 1)
    held = pb.Held(ticket=grants[1].ticket, part=grants[1].parts[0].number)
    said.put(pb.FromWorker(seq=3, beat=pb.BeatMessage(held=[held])))
    assert next(stream).re == 3
    begun = time.monotonic()
    stream.cancel()
    assert gate.take(wait_s=30).json["parts"][0]["number"] == held.part
    assert time.monotonic() - begun < allowed_s(12)  # 9 s, and what a busy machine takes
    assert client.get(request_id).status().parts.done == 1


def test_errors_have_their_codes(gate: Gate, channel: Any, stubs: Any) -> None:
    work, requests = stubs["WorkStub"](channel), stubs["RequestsStub"](channel)
    code = grpc.StatusCode
    for call, message, expected, word in (
        (requests.Get, pb.RequestId(id="none"), code.NOT_FOUND, "UNKNOWN"),
        (requests.Control, pb.ControlAsk(id="x", action="eat"), code.INVALID_ARGUMENT, "INVALID"),
        (work.Report, pb.ReportMessage(ticket="x"), code.FAILED_PRECONDITION, "TICKET"),
        (work.Take, pb.Ask(who=pb.Hello()), code.INVALID_ARGUMENT, "INVALID"),
        (
            requests.Submit,
            pb.NewRequest(handler="h", options="{"),
            code.INVALID_ARGUMENT,
            "INVALID",
        ),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            call(message)
        assert refused.value.code() == expected
        assert dict(refused.value.trailing_metadata())["streamq-code"] == word


def chunks_of(data: bytes, gate: Gate, **head: Any) -> list[Any]:
    """A file of lines as messages of ``Load``, in pieces that end within lines."""
    made = [pb.LoadChunk(data=data[at : at + 7]) for at in range(0, len(data), 7)]
    made[-1].is_last = True
    named = {"id": f"file-{gate.queue}", "handler": "h", "queue": gate.queue, "format": "lines"}
    made[0].head.CopyFrom(pb.LoadHead(**named | head))
    return made


def test_file_is_loaded_and_the_same_file_again_adds_nothing(
    gate: Gate, channel: Any, stubs: Any, client: Client
) -> None:
    requests = stubs["RequestsStub"](channel)
    data = b"".join(b"line %d\n" % number for number in range(100))
    chunks = chunks_of(data, gate, options='{"lines": 10, "limit": 2}')
    found = requests.Load(iter(chunks))
    assert (found.offset, found.is_complete, found.status.total) == (len(data), True, 10)
    assert requests.Load(iter(chunks)).status.total == 10
    assert client.get(f"file-{gate.queue}").status().limit == 2


def test_file_that_was_cut_stays_open_for_the_rest(gate: Gate, channel: Any, stubs: Any) -> None:
    requests = stubs["RequestsStub"](channel)
    data = b"".join(b"line %d\n" % number for number in range(100))
    options = '{"lines": 1}'
    said: queues.Queue[Any] = queues.Queue()
    for chunk in chunks_of(data, gate, options=options)[:50]:
        said.put(chunk)
    call = requests.Load.future(iter(said.get, None))
    path = f"/v1/requests/file-{gate.queue}/input"
    wait_until(lambda: gate.get(path).json.get("offset"), 20)
    said.put(None)
    assert call.exception(20).code() == grpc.StatusCode.DEADLINE_EXCEEDED
    stands = gate.get(path).json
    assert 0 < stands["offset"] < len(data)
    assert not stands["is_complete"]
    with pytest.raises(grpc.RpcError) as short:
        requests.Load(iter(chunks_of(data[5:], gate, options=options, begins_at=5)))
    told = dict(short.value.trailing_metadata())
    assert (told["streamq-code"], int(told["streamq-offset"])) == ("SHORT", stands["offset"])
    rest = chunks_of(data[stands["offset"] :], gate, options=options, begins_at=stands["offset"])
    found = requests.Load(iter(rest))
    assert (found.offset, found.is_complete, found.status.total) == (len(data), True, 100)


def test_load_that_the_caller_gives_up_is_not_complete(
    gate: Gate, channel: Any, stubs: Any, client: Client
) -> None:
    data = b"".join(b"line %d\n" % number for number in range(1_000))
    said: queues.Queue[Any] = queues.Queue()
    for chunk in chunks_of(data, gate, options='{"lines": 1}')[:500]:
        said.put(chunk)
    call = stubs["RequestsStub"](channel).Load.future(iter(said.get, None))
    path = f"/v1/requests/file-{gate.queue}/input"
    wait_until(lambda: gate.get(path).json.get("offset"), 20)
    call.cancel()
    # The same again is refused while the first one is read.
    found = wait_until(
        lambda: stubs["RequestsStub"](channel).Load(
            iter(chunks_of(data, gate, options='{"lines": 1}'))
        ),
        30,
    )
    assert (found.offset, found.status.total) == (len(data), 1_000)
    assert "Traceback" not in gate.log


def test_list_and_errors(gate: Gate, channel: Any, stubs: Any) -> None:
    requests = stubs["RequestsStub"](channel)
    ids = [gate.submit([text], labels={"of": text}, retries=0) for text in ("a", "b")]
    ticket = gate.take().json["ticket"]
    failed = [{"part": 1, "kind": "abandon", "error": "Bad", "message": "no", "traceback": "tb"}]
    gate.post("/v1/report", {"ticket": ticket, "failed": failed})
    found = requests.List(pb.ListAsk(queue=gate.queue))
    assert ([each.id for each in found.requests], found.total) == (ids[::-1], 2)
    assert [dict(each.labels) for each in found.requests] == [{"of": "b"}, {"of": "a"}]
    (live,) = requests.List(pb.ListAsk(queue=gate.queue, live_only=True)).requests
    (ended,) = (each for each in found.requests if each.id != live.id)
    assert (ended.state, ended.has_failures) == ("done", True)
    (same,) = requests.List(pb.ListAsk(queue=gate.queue, state="failed")).requests
    assert same == ended
    (given_up,) = requests.Errors(pb.ErrorsAsk(id=ended.id))
    assert (given_up.part, given_up.error, given_up.message) == (1, "Bad", "no")
    assert given_up.traceback == "tb"
    assert list(requests.Errors(pb.ErrorsAsk(id=ended.id, after=1))) == []


def test_set_and_purge(gate: Gate, channel: Any, stubs: Any) -> None:
    requests = stubs["RequestsStub"](channel)
    request_id = gate.submit(["x"])

    def control(action: str, **more: str) -> Any:
        return requests.Control(pb.ControlAsk(id=request_id, action=action, **more))

    assert json.loads(control("set", changes='{"limit": 3}').json)["limit"] == 3
    path = f"/v1/changes?queue={gate.queue}"
    wait_until(lambda: "limit" in gate.get(path).text)
    with pytest.raises(grpc.RpcError) as refused:
        control("purge")
    assert dict(refused.value.trailing_metadata())["streamq-code"] == "NOTENDED"
    assert control("cancel").state == "cancelled"
    assert control("purge").state == "cancelled"
    assert gate.get(f"/v1/requests/{request_id}").status == 404


def test_every_call_with_every_role(serve: Serve, tmp_path: Path, stubs: Any) -> None:
    file = tmp_path / "streamq.keys"
    texts = {
        role: keys.add_key(file, role.value, role) for role in Role if role is not Role.ANYBODY
    }
    gate = serve("--grpc", "127.0.0.1:0", "--keys", str(file))
    expected = {
        "Take": (Role.WORKER, pb.Ask()),
        "Report": (Role.WORKER, pb.ReportMessage()),
        "Beat": (Role.WORKER, pb.BeatMessage()),
        "Leave": (Role.WORKER, pb.Bye()),
        "Submit": (Role.LOADER, pb.NewRequest()),
        "Get": (Role.READER, pb.RequestId(id="x")),
        "Load": (Role.LOADER, iter([pb.LoadChunk()])),
        "List": (Role.READER, pb.ListAsk(queue=gate.queue)),
        "Errors": (Role.READER, pb.ErrorsAsk(id="x")),
        "Control": (Role.OPERATOR, pb.ControlAsk()),
        "Watch": (Role.READER, pb.RequestId(id="x")),
        "Results": (Role.LOADER, pb.ResultsAsk(id="x")),
        "Session": (Role.WORKER, iter([])),
    }
    with grpc.insecure_channel(f"127.0.0.1:{port_of(gate)}") as channel:
        both = {**vars(stubs["WorkStub"](channel)), **vars(stubs["RequestsStub"](channel))}
        assert both.keys() == expected.keys()
        for name, (wanted, message) in expected.items():
            for role, text in [*texts.items(), (None, "sqk_no")]:
                found = _code_of(both[name], message, text)
                if role is None:
                    assert found in ("UNAUTHENTICATED", "RESOURCE_EXHAUSTED"), name
                else:
                    assert (found != "PERMISSION_DENIED") == role.allows(wanted), (name, role)


def _code_of(call: Any, message: Any, text: str) -> str:
    try:
        answer = call(message, metadata=[("authorization", f"Bearer {text}")], timeout=10)
        if hasattr(answer, "__next__"):
            list(answer)
    except grpc.RpcError as refused:
        return str(refused.code().name)
    return "OK"


def test_messages_of_strangers_are_not_read(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "streamq.keys"
    text = keys.add_key(file, "al", Role.WORKER)
    gate = serve("--grpc", "127.0.0.1:0", "--keys", str(file))
    garbage = b"\xff" * 1_000_000
    with grpc.insecure_channel(f"127.0.0.1:{port_of(gate)}") as channel:
        call = channel.unary_unary("/streamq.v1.Work/Report")
        # Whoever has a key is told that this is no message; a stranger only that a key is needed.
        assert _code_of(call, garbage, text) == "UNKNOWN"
        assert _code_of(call, garbage, "sqk_no") == "UNAUTHENTICATED"
        unknown = channel.unary_unary("/streamq.v1.Work/Nothing")
        assert _code_of(unknown, b"", text) == "UNIMPLEMENTED"


def test_silent_connections_keep_nobody_out_for_long(serve: Serve, stubs: Any) -> None:
    gate = serve(
        *("--grpc", "127.0.0.1:0", "--max-connections", "20"),
        hasty="import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (296, 296)); "
        "import streamq.gateway.grpc_service as s; "
        "s._OPTIONS.append(('grpc.server_handshake_timeout_ms', 2_000))",
    )
    with ExitStack() as stack:
        where = ("127.0.0.1", port_of(gate))
        for _ in range(400):
            stack.enter_context(socket.create_connection(where, 20))
        assert gate.get("/v1/queues").status == 200
        with grpc.insecure_channel(f"127.0.0.1:{where[1]}") as channel:
            get = stubs["RequestsStub"](channel).Get
            wait_until(lambda: _code_of(get, pb.RequestId(id="x"), "") == "NOT_FOUND", 30)
    assert "Too many open files" not in gate.log


@pytest.mark.long
def test_connections_without_a_call_keep_nobody_out_for_long(serve: Serve, stubs: Any) -> None:
    gate = serve(
        *("--grpc", "127.0.0.1:0", "--max-connections", "20"),
        hasty="import streamq.gateway.grpc_service as s; "
        "options = dict(s._OPTIONS); assert options['grpc.max_connection_idle_ms'] == 30_000; "
        "s._OPTIONS.append(('grpc.max_connection_idle_ms', 1_000))",
    )
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    with ExitStack() as stack:
        where = ("127.0.0.1", port_of(gate))
        for _ in range(40):
            raw = stack.enter_context(socket.create_connection(where, 20))
            raw.sendall(preface + settings)
        with grpc.insecure_channel(f"127.0.0.1:{where[1]}") as channel:
            get = stubs["RequestsStub"](channel).Get
            wait_until(lambda: _code_of(get, pb.RequestId(id="x"), "") == "NOT_FOUND", 45)


def test_stream_of_a_key_that_was_taken_away_ends(serve: Serve, tmp_path: Path, stubs: Any) -> None:
    file = tmp_path / "streamq.keys"
    keys.add_key(file, "bo", Role.WORKER)
    before = file.read_text()
    text = keys.add_key(file, "al", Role.WORKER)
    gate = serve("--grpc", "127.0.0.1:0", "--keys", str(file))
    said: queues.Queue[Any] = queues.Queue()
    with grpc.insecure_channel(f"127.0.0.1:{port_of(gate)}") as channel:
        metadata = [("authorization", f"Bearer {text}")]
        stream = stubs["WorkStub"](channel).Session(iter(said.get, None), metadata=metadata)
        said.put(pb.FromWorker(seq=1, hello=who(gate)))
        assert next(stream).HasField("welcome")
        file.write_text(before)
        leave = stubs["WorkStub"](channel).Leave
        wait_until(lambda: _code_of(leave, pb.Bye(), text) != "OK")
        said.put(pb.FromWorker(seq=2, beat=pb.BeatMessage()))
        with pytest.raises(grpc.RpcError) as ended:
            list(stream)
        said.put(None)
    assert ended.value.code().name == "UNAUTHENTICATED"
