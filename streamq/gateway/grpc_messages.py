"""Turns messages of gRPC (``proto/streamq.proto``) into those of the gateway, and back."""

from base64 import b64decode, b64encode
from typing import Any

import msgspec
from msgspec import UNSET

from streamq.errors import InvalidValue
from streamq.gateway import messages, session_messages
from streamq.gateway import streamq_pb2 as pb
from streamq.gateway.session_messages import FromWorker, ToWorker
from streamq.model import Status


def hello_from_proto(found: pb.Hello) -> session_messages.Hello:
    """Return what a worker says of itself, with defaults for what it does not say."""
    said: dict[str, Any] = {
        name: value
        for name in ("name", "queue", "levels", "slots", "as", "most", "max_bytes", "quantum_ms")
        if (value := getattr(found, name))
    }
    said |= {name: value for name in ("lease_ms", "version") if (value := getattr(found, name))}
    said["handlers"] = [
        {"name": each.name, **({"retries": each.retries} if each.HasField("retries") else {})}
        for each in found.handlers
    ]
    said["holding"] = _held_tickets_of_proto(found.holding)
    return _proto_checked_as_json_is(said, session_messages.Hello)


def ask_from_proto(found: pb.Ask) -> messages.Ask:
    """Return what a worker asks for."""
    made = hello_from_proto(found.who).ask()
    made.wait_s = min(found.wait_ms / 1e3 if found.HasField("wait_ms") else messages.WAIT_S, 50.0)
    return made


def beat_from_proto(found: pb.BeatMessage) -> messages.Beat:
    """Return a sign of life."""
    return _proto_checked_as_json_is({"tickets": _held_tickets_of_proto(found.held)}, messages.Beat)


def report_from_proto(found: pb.ReportMessage, *, is_on_stream: bool = False) -> messages.Report:
    """Return what became of parts."""
    said: dict[str, Any] = {
        "ticket": found.ticket,
        "done": [
            {"part": each.part, "result": value_from_proto(each.value)} for each in found.done
        ],
        "failed": [_failure_from_proto(each) for each in found.failed],
        "back": list(found.back),
        "crashed": found.crashed if found.HasField("crashed") else None,
    }
    made: messages.Report = _proto_checked_as_json_is(said, messages.Report)
    if found.HasField("next"):
        # On a stream the worker's hello says which handlers it has.
        most = found.next.who.most or messages.Ask().most
        made.next = messages.Ask(most=most) if is_on_stream else ask_from_proto(found.next)
    return made


def value_from_proto(found: pb.Value) -> dict[str, Any] | None:
    """Return a payload or a result."""
    form = found.WhichOneof("value")
    if form is None:
        return None
    if form == "data":
        return {"base64": b64encode(found.data).decode()}
    text = getattr(found, form)
    return {form: msgspec.Raw(text.encode()) if form == "json" else text}


def worker_message_from_proto(found: pb.FromWorker) -> FromWorker:
    """Return a message of a worker's stream."""
    made = FromWorker(seq=found.seq)
    word = found.WhichOneof("says")
    if word == "hello":
        made.hello = hello_from_proto(found.hello)
    elif word == "want":
        made.want = session_messages.Want(found.want.slots)
    elif word == "report":
        made.report = report_from_proto(found.report, is_on_stream=True)
    elif word == "beat":
        made.beat = beat_from_proto(found.beat)
    elif word == "bye":
        made.bye = session_messages.Bye(list(found.bye.tickets))
    return made


def worker_message_to_proto(message: ToWorker) -> pb.ToWorker:
    """Return a message to a worker's stream."""
    made = pb.ToWorker(re=message.re)
    if isinstance(message.grant, messages.Granted):
        made.grant.CopyFrom(grant_to_proto(message.grant))
        return made
    for name in ("welcome", "give_back", "verdict", "go_away", "pause", "error"):
        said = getattr(message, name)
        if said is not UNSET:
            target = getattr(made, name)
            target.SetInParent()
            for field, content in msgspec.structs.asdict(said).items():
                if isinstance(content, list):
                    getattr(target, field).extend(content)
                else:
                    setattr(target, field, content)
    return made


def grant_to_proto(granted: messages.Granted | None) -> pb.Grant:
    """Return what a worker is handed."""
    if granted is None:
        return pb.Grant()
    return pb.Grant(
        word=granted.word,
        ticket=granted.ticket,
        request=granted.request,
        handler=granted.handler,
        parts=[_part_to_proto(each) for each in granted.parts],
        counted=granted.counted if isinstance(granted.counted, int) else 0,
        lease_ms=granted.lease_ms,
        timeout_ms=granted.timeout_ms,
        beat_ms=granted.beat_ms,
    )


def result_to_proto(found: messages.Value | None) -> pb.Value:
    """Return a result as it is told."""
    made = pb.Value()
    if found is not None:
        _set_proto_value(made, found)
    return made


def status_to_proto(found: Status) -> pb.Status:
    """Return where a request stands."""
    parts = found.parts
    return pb.Status(
        id=found.id,
        state=found.state.value,
        paused=found.paused,
        total=parts.total,
        waiting=parts.waiting,
        running=parts.running,
        retry=parts.retry,
        done=parts.done,
        failed=parts.failed,
        json=msgspec.json.encode(found).decode(),
    )


def new_request_from_proto(found: pb.NewRequest) -> messages.NewRequest:
    """Return a request to make."""
    options = _json_object_of_proto(found.options, "options")
    parts = [msgspec.Raw(_json_payload_of_proto(value_from_proto(each))) for each in found.parts]
    said = {"handler": found.handler, **options}
    said |= {name: text for name in ("id", "queue") if (text := getattr(found, name))}
    made: messages.NewRequest = _proto_checked_as_json_is(said, messages.NewRequest)
    made.parts = parts
    return made


def upload_from_proto(found: pb.LoadHead) -> messages.UploadOptions:
    """Return how a file becomes a request."""
    said = {"handler": found.handler, **_json_object_of_proto(found.options, "options")}
    said |= {name: text for name in ("queue", "format") if (text := getattr(found, name))}
    made: messages.UploadOptions = _proto_checked_as_json_is(said, messages.UploadOptions)
    return made


def loaded_to_proto(found: messages.Uploaded) -> pb.Loaded:
    """Return how far a load has come."""
    return pb.Loaded(
        offset=found.offset, is_complete=found.is_complete, status=status_to_proto(found.status)
    )


def changes_from_proto(found: pb.ControlAsk) -> messages.Changes:
    """Return what to change of a request."""
    made: messages.Changes = _proto_checked_as_json_is(
        _json_object_of_proto(found.changes, "changes"), messages.Changes
    )
    return made


def requests_to_proto(found: messages.Listed) -> pb.Listed:
    """Return requests of a queue."""
    said = msgspec.to_builtins(found)
    return pb.Listed(**said | {"requests": [pb.ListedRequest(**each) for each in said["requests"]]})


def failures_to_proto(found: messages.FailureTold) -> pb.GivenUp:
    """Return what was given up."""
    return pb.GivenUp(**msgspec.to_builtins(found))


def _json_object_of_proto(text: str, name: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise InvalidValue(f"{name}: {error}") from None


def _json_payload_of_proto(found: dict[str, Any] | None) -> bytes:
    if found is not None and "json" in found:
        return bytes(found["json"])
    return msgspec.json.encode(found)


def _part_to_proto(part: messages.PartTold) -> pb.Part:
    made = pb.Part(
        number=part.number,
        attempt=part.attempt,
        records=part.records if isinstance(part.records, int) else 0,
        alone=part.alone,
        source=part.source,
        line=part.line,
    )
    _set_proto_value(made.payload, part)
    return made


def _set_proto_value(made: pb.Value, found: messages.Value | messages.PartTold) -> None:
    if isinstance(found.base64, str):
        made.data = b64decode(found.base64)
    elif isinstance(found.text, str):
        made.text = found.text
    elif isinstance(found.json, msgspec.Raw):
        made.json = bytes(found.json).decode()
    elif isinstance(found, messages.Value) and isinstance(found.lines, str):
        made.lines = found.lines


def _held_tickets_of_proto(found: Any) -> list[dict[str, Any]]:
    return [
        {"ticket": each.ticket, "part": each.part if each.HasField("part") else None}
        for each in found
    ]


def _failure_from_proto(found: pb.Failure) -> dict[str, Any]:
    said: dict[str, Any] = {
        name: text
        for name in ("kind", "error", "message", "traceback")
        if (text := getattr(found, name))
    }
    if found.HasField("after_ms"):
        said["after_ms"] = found.after_ms
    return {"part": found.part, **said}


def _proto_checked_as_json_is(said: dict[str, Any], kind: Any) -> Any:
    """Return the message as a struct, with the same checks as a body of JSON."""
    try:
        return msgspec.convert(said, kind)
    except msgspec.ValidationError as error:
        raise InvalidValue(str(error)) from None
