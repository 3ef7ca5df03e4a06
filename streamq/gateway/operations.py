"""Carries out calls: one function for every line of the table in ``routes.py``."""

from importlib.metadata import version as streamq_version
from pathlib import Path

import msgspec

from streamq.errors import InvalidValue
from streamq.gateway import cookies
from streamq.gateway.desk import Handed
from streamq.gateway.messages import (
    MOST_WAIT_S,
    WAIT_S,
    Health,
    NewRequest,
    UploadOptions,
    Version,
    Who,
)
from streamq.gateway.problems import Problem
from streamq.gateway.roles import Caller
from streamq.gateway.route import Answer, Call, Gateway

MOST_RESULTS = 10**9
#: A wheel has the file in the package; a checkout has it in ``proto/``.
_PROTOS = (Path(__file__).parents[1] / "proto", Path(__file__).parents[2] / "proto")
PROTO = next(
    (folder / "streamq.proto" for folder in _PROTOS if (folder / "streamq.proto").exists()),
    _PROTOS[0] / "streamq.proto",
)


async def take(gateway: Gateway, call: Call) -> Answer:
    """Wait for parts."""
    return _answer_with_parts(await gateway.desk.take(call.caller, call.body))


async def report(gateway: Gateway, call: Call) -> Answer:
    """Tell what became of parts."""
    return _answer_with_parts(await gateway.desk.report(call.caller, call.body))


def _answer_with_parts(handed: Handed) -> Answer:
    if handed.granted is None:
        return Answer(204)
    return Answer(200, handed.granted, delivered=handed.delivered)


async def beat(gateway: Gateway, call: Call) -> Answer:
    """Say that a worker lives."""
    return Answer(200, await gateway.desk.beat(call.caller, call.body))


async def leave(gateway: Gateway, call: Call) -> Answer:
    """Say that a worker goes."""
    return Answer(200, await gateway.desk.leave(call.caller, call.body))


async def submit(gateway: Gateway, call: Call) -> Answer:
    """Make a request."""
    new: NewRequest = call.body
    is_loading = new.state == "loading"
    make = gateway.loads.open if is_loading else gateway.requests.submit
    status, is_new = await make(call.caller, new)
    unsafe = "without an id the same call again makes another request"
    headers = {} if new.id is not None else {"Warning": f'199 - "{unsafe}"'}
    return Answer(201 if is_new else 200, status, headers=headers)


async def status(gateway: Gateway, call: Call) -> Answer:
    """Tell where a request stands."""
    return Answer(200, await gateway.requests.status(call.caller, call.path["id"]))


async def wait(gateway: Gateway, call: Call) -> Answer:
    """Wait until a request has ended."""
    wait_s = call.number("wait_s", WAIT_S, 0, MOST_WAIT_S)
    found = await gateway.requests.wait(call.caller, call.path["id"], wait_s)
    return Answer(202 if found.state.is_live else 200, found)


async def results(gateway: Gateway, call: Call) -> Answer:
    """Read results."""
    first = int(call.number("from", 1, 1, 2**53))
    most = int(call.number("most", MOST_RESULTS, 1, MOST_RESULTS))
    is_following = bool(call.number("follow", 0, 0, 1))
    lines = await gateway.requests.results(call.caller, call.path["id"], first, most, is_following)
    return Answer(200, lines=lines)


async def append(gateway: Gateway, call: Call) -> Answer:
    """Add parts to a request that is loading."""
    return Answer(200, await gateway.loads.append(call.caller, call.path["id"], call.body))


async def seal(gateway: Gateway, call: Call) -> Answer:
    """Say that a load is complete."""
    return Answer(200, await gateway.loads.seal(call.caller, call.path["id"], call.body))


async def upload(gateway: Gateway, call: Call) -> Answer:
    """Load a file."""
    return await _answer_to_upload(gateway, call, None)


async def upload_rest(gateway: Gateway, call: Call) -> Answer:
    """Load the rest of a file."""
    text = call.visit.headers.get("upload-offset", "")
    if not text.isascii() or not text.isdecimal():
        raise InvalidValue("the header Upload-Offset must say at which byte the rest begins")
    return await _answer_to_upload(gateway, call, int(text))


async def _answer_to_upload(gateway: Gateway, call: Call, begins_at: int | None) -> Answer:
    assert call.stream is not None
    try:
        options = msgspec.convert({**call.query}, UploadOptions, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidValue(f"the query is not what the call takes: {error}") from None
    found, is_new = await gateway.uploads.put(
        call.caller, call.path["id"], options, call.stream, begins_at
    )
    headers = {"Upload-Offset": str(found.offset)}
    return Answer(201 if is_new else 200, found, headers=headers)


async def uploaded(gateway: Gateway, call: Call) -> Answer:
    """Tell how far an upload has come."""
    found = await gateway.uploads.stands(call.caller, call.path["id"])
    return Answer(200, found, headers={"Upload-Offset": str(found.offset)})


async def commit(gateway: Gateway, call: Call) -> Answer:
    """Have the server forget results that are safely written."""
    return Answer(200, await gateway.loads.commit(call.caller, call.path["id"], call.body))


async def errors(gateway: Gateway, call: Call) -> Answer:
    """Tell what was given up."""
    after = int(call.number("after", 0, 0, 2**53))
    most = int(call.number("most", 100, 1, 10_000))
    return Answer(200, await gateway.control.errors(call.caller, call.path["id"], after, most))


async def requests(gateway: Gateway, call: Call) -> Answer:
    """List requests."""
    found = await gateway.control.requests(
        call.caller,
        call.text("queue", "default"),
        state=call.text("state"),
        handler=call.text("handler"),
        ended=bool(call.number("ended", 1, 0, 1)),
        most=int(call.number("most", 50, 1, 1_000)),
    )
    return Answer(200, found)


async def queues(gateway: Gateway, call: Call) -> Answer:
    """List queues."""
    return Answer(200, await gateway.control.queues(call.caller))


async def _act_on_request(gateway: Gateway, call: Call, verb: str) -> Answer:
    done = await gateway.control.act(call.caller, call.path["id"], verb)
    return Answer(200, done, noted=verb)


async def release(gateway: Gateway, call: Call) -> Answer:
    """Let all parts of a request run that has a canary."""
    return await _act_on_request(gateway, call, "release")


async def pause(gateway: Gateway, call: Call) -> Answer:
    """Start no more parts of a request."""
    return await _act_on_request(gateway, call, "pause")


async def resume(gateway: Gateway, call: Call) -> Answer:
    """Start parts of a request again."""
    return await _act_on_request(gateway, call, "resume")


async def cancel(gateway: Gateway, call: Call) -> Answer:
    """End a request now."""
    return await _act_on_request(gateway, call, "cancel")


async def retry(gateway: Gateway, call: Call) -> Answer:
    """Run the failed parts of a request again."""
    return await _act_on_request(gateway, call, "retry")


async def change(gateway: Gateway, call: Call) -> Answer:
    """Change level, limit, rate or weight of a request."""
    status, noted = await gateway.control.change(call.caller, call.path["id"], call.body)
    return Answer(200, status, noted=noted)


async def purge(gateway: Gateway, call: Call) -> Answer:
    """Remove an ended request."""
    await gateway.control.purge(call.caller, call.path["id"])
    return Answer(204, noted="purge")


async def version(gateway: Gateway, call: Call) -> Answer:
    """Tell which version this is."""
    return Answer(200, Version(streamq_version("streamq")))


async def proto(gateway: Gateway, call: Call) -> Answer:
    """Tell the proto."""
    return Answer(200, text=PROTO.read_text("utf-8"))


async def log_in(gateway: Gateway, call: Call) -> Answer:
    """Begin the session of a browser."""
    key, cookie = gateway.access.log_in(call.visit, call.body.key)
    is_secure = gateway.access.is_secure(call.scheme)
    headers = {"Set-Cookie": cookies.set_cookie_header(cookie, is_secure=is_secure)}
    return Answer(200, _who_calls(key.caller), headers=headers)


async def log_out(gateway: Gateway, call: Call) -> Answer:
    """End the session of a browser."""
    is_secure = gateway.access.is_secure(call.scheme)
    return Answer(
        204, headers={"Set-Cookie": cookies.set_cookie_header("", is_secure=is_secure, lasts_s=0)}
    )


async def whoami(gateway: Gateway, call: Call) -> Answer:
    """Tell who calls."""
    return Answer(200, _who_calls(call.caller))


def _who_calls(caller: Caller) -> Who:
    queues = None if caller.queues is None else sorted(caller.queues)
    return Who(caller.name, caller.role.value, queues)


async def livez(gateway: Gateway, call: Call) -> Answer:
    """Tell that the gateway answers."""
    return Answer(200, Health("ok"))


async def healthz(gateway: Gateway, call: Call) -> Answer:
    """Tell that the gateway answers."""
    return Answer(200, Health("ok"))


async def readyz(gateway: Gateway, call: Call) -> Answer:
    """Tell whether the gateway can serve."""
    if why := gateway.unready():
        raise Problem(503, "AWAY", why, retry_after_s=1)
    return Answer(200, Health("ok"))
