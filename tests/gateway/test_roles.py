"""Who may use which route: every route with every role, with keys of this queue and of another."""

import http.cookies
import json
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamq.gateway import keys
from streamq.gateway.roles import KEY_ROLES, Role
from streamq.gateway.route import Route
from streamq.gateway.routes import ROUTES
from tests.conftest import ONE_KIND
from tests.gateway.common import Gate
from tests.support.command import run
from tests.support.waiting import wait_until

pytestmark = ONE_KIND

Serve = Callable[..., Gate]
#: What a route is called with where its body must say which queue it means.
_BODIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "take": lambda queue: {"queue": queue, "handlers": ["h"], "wait_s": 0},
    "append": lambda _: {"first": 1, "parts": ["x"]},
    "seal": lambda _: {"total": 1},
    "commit": lambda _: {"through": 1},
    "submit": lambda queue: {"queue": queue, "handler": "h", "parts": []},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "streamq.keys"


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


def _body(route: Route, queue: str) -> dict[str, Any]:
    make = _BODIES.get(route.name)
    return make(queue) if make else {}


def called(gate: Gate, route: Route, request_id: str, headers: dict[str, str]) -> tuple[int, str]:
    """The status and the code of a call that is right but for who makes it."""
    body = _body(route, gate.queue) if route.body else None
    path = route.path.replace("{id}", request_id) + ("?wait_s=0" if route.name == "wait" else "")
    if route.takes_file:
        path += f"?queue={gate.queue}&handler=h&format=lines"
        headers = headers | {"Upload-Offset": "0"}
    reply = gate.call(route.method, path, body, headers)
    is_problem = reply.headers.get("content-type") == "application/problem+json"
    return reply.status, reply.json["code"] if is_problem else ""


def test_every_route_with_every_role(serve: Serve, file: Path, queue: str) -> None:
    texts = {role: keys.add_key(file, role.value, role) for role in KEY_ROLES}
    gate = serve("--keys", str(file))
    gate.headers = bearer(texts[Role.OPERATOR])
    wrong: list[object] = []
    for route in ROUTES:
        for role, text in texts.items():
            request_id = gate.submit(["x"])
            status, code = called(gate, route, request_id, bearer(text))
            is_let_in = (status, code) not in ((403, "ROLE"), (401, "KEY"))
            # A wrong body of a login is refused as such; its right one is tested below.
            if is_let_in != role.allows(route.role):
                wrong.append((route.method, route.path, role, status, code))
        if route.role is not Role.ANYBODY:
            gate.headers, kept = {}, gate.headers
            status, code = called(gate, route, request_id, {})
            if (status, code) != (401, "KEY"):
                wrong.append((route.method, route.path, "no key", status, code))
            gate.headers = kept
    assert wrong == []


def test_every_route_with_a_key_of_another_queue(serve: Serve, file: Path, queue: str) -> None:
    own = keys.add_key(file, "own", Role.OPERATOR, [queue])
    other = keys.add_key(file, "other", Role.OPERATOR, ["elsewhere"])
    gate = serve("--keys", str(file))
    gate.headers = bearer(own)
    wrong: list[object] = []
    for route in ROUTES:
        if "{id}" not in route.path and route.name not in ("take", "submit"):
            continue
        request_id = gate.submit(["x"])
        if (found := called(gate, route, request_id, bearer(other))) != (403, "ROLE"):
            wrong.append((route.method, route.path, found))
    assert wrong == []


def test_ticket_works_with_the_key_it_was_given_to_only(serve: Serve, file: Path) -> None:
    al, bo = (keys.add_key(file, name, Role.OPERATOR) for name in ("al", "bo"))
    gate = serve("--keys", str(file))
    gate.headers = bearer(al)
    gate.submit(["x"])
    ticket = gate.take().json["ticket"]
    for path, body in (
        ("/v1/report", {"ticket": ticket}),
        ("/v1/beat", {"tickets": [{"ticket": ticket}]}),
        ("/v1/leave", {"tickets": [ticket]}),
    ):
        reply = gate.post(path, body, headers=bearer(bo))
        assert (reply.status, reply.json["code"]) == (410, "TICKET")
    assert gate.post("/v1/report", {"ticket": ticket, "done": [{"part": 1}]}).json["counted"] == 1


def test_ticket_works_at_every_gateway_of_the_file(serve: Serve, file: Path) -> None:
    al = keys.add_key(file, "al", Role.OPERATOR)
    first, second = serve("--keys", str(file)), serve("--keys", str(file))
    first.headers = second.headers = bearer(al)
    first.submit(["x"])
    ticket = first.take().json["ticket"]
    assert second.post("/v1/report", {"ticket": ticket, "done": [{"part": 1}]}).json["counted"] == 1


def test_key_by_the_command_and_taken_away_while_it_serves(
    serve: Serve, file: Path, queue: str
) -> None:
    made = run("serve", "key", "mill", "--role", "reader", "--queue", queue, "--keys", str(file))
    text = made.stdout.strip()
    gate = serve("--keys", str(file))
    reply = gate.get("/v1/session", headers=bearer(text))
    assert reply.json == {"name": "mill", "role": "reader", "queues": [queue]}
    more = run("serve", "key", "al", "--role", "operator", "--keys", str(file), "--json")
    al = json.loads(more.stdout)["key"]
    wait_until(lambda: gate.get("/v1/session", headers=bearer(al)).status == 200)
    kept = file.read_text().replace('name = "mill"', 'name = "nobody"')
    sha = keys.digest_of_key(text)
    file.write_text(kept.replace(sha, "0" * 64))
    wait_until(lambda: gate.get("/v1/session", headers=bearer(text)).status in (401, 429))
    assert "wrong or expired key came from 127.0.0.1" in gate.log
    assert text not in gate.log


def test_changes_are_logged_with_who_made_them(serve: Serve, file: Path) -> None:
    text = keys.add_key(file, "al", Role.LOADER)
    gate = serve("--keys", str(file))
    gate.headers = bearer(text)
    gate.submit(["x"])
    wait_until(lambda: "201 by al (loader) at 127.0.0.1" in gate.log)


def test_browser_logs_in_and_out(serve: Serve, file: Path) -> None:
    text = keys.add_key(file, "al", Role.OPERATOR)
    gate = serve("--keys", str(file))
    wrong = gate.post("/v1/session", {"key": "sqk_x"})
    assert (wrong.status, wrong.json["code"]) == (401, "KEY")
    reply = gate.post("/v1/session", {"key": text})
    assert reply.json["name"] == "al"
    (cookie,) = http.cookies.SimpleCookie(reply.headers["set-cookie"]).values()
    assert cookie["httponly"]
    assert (cookie["samesite"], cookie["max-age"]) == ("Strict", "43200")
    assert not cookie["secure"]
    gate.headers = {"Cookie": f"{cookie.key}={cookie.value}"}
    assert gate.get("/v1/session").json["name"] == "al"
    gate.submit(["x"])
    site = {"Sec-Fetch-Site": "cross-site"}
    assert gate.post("/v1/requests", {}, headers=site).json["code"] == "SITE"
    out = gate.call("DELETE", "/v1/session")
    assert (out.status, "Max-Age=0" in out.headers["set-cookie"]) == (204, True)


def test_every_answer_tells_browsers_what_they_may_do(gate: Gate) -> None:
    for path in ("/livez", "/v1/none", "/v1/session", f"/v1/requests/{gate.submit(['x'])}/results"):
        headers = gate.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


def test_read_only_tells_and_changes_nothing(serve: Serve, gate: Gate) -> None:
    request_id = gate.submit(["x"])
    only = serve("--read-only")
    for route in ROUTES:
        status, code = called(only, route, request_id, {})
        is_told = Role.READER.allows(route.role)
        assert ((status, code) == (403, "READONLY")) != is_told, route.path
    assert only.get(f"/v1/requests/{request_id}").json["id"] == request_id


class TestDoors:
    def test_other_machines_need_keys_and_tls(self, url: str, file: Path) -> None:
        keys.add_key(file, "al", Role.READER)
        ran = run("serve", "--url", url, "--listen", "0.0.0.0:0", "--keys", str(file))
        assert ran.returncode == 2
        assert "without TLS anybody between could read the keys" in ran.stderr

    def test_insecure_leaves_tls_to_a_proxy(self, serve: Serve, file: Path) -> None:
        text = keys.add_key(file, "al", Role.READER)
        gate = serve("--listen", "0.0.0.0:0", "--keys", str(file), "--insecure")
        gate.headers = bearer(text) | {"Host": "streamq-gateway.default.svc"}
        assert gate.get("/v1/session").status == 200

    def test_file_of_keys_that_is_not_there(self, url: str, file: Path) -> None:
        ran = run("serve", "--url", url, "--keys", str(file))
        assert (ran.returncode, str(file) in ran.stderr) == (2, True)

    def test_half_of_tls(self, url: str, file: Path) -> None:
        ran = run("serve", "--url", url, "--tls-cert", str(file))
        assert (ran.returncode, "--tls-key" in ran.stderr) == (2, True)


def test_tls_with_client_certificates(serve: Serve, file: Path, tmp_path: Path) -> None:
    certificates(tmp_path, "server", "mill", "eve")
    text = keys.add_key(file, "al", Role.READER)
    keys.add_key(file, "mill", Role.WORKER)
    gate = serve(
        *("--keys", str(file), "--tls-cert", str(tmp_path / "server.crt")),
        *("--tls-key", str(tmp_path / "server.key"), "--tls-client-ca", str(tmp_path / "ca.crt")),
    )
    assert gate.url.startswith("https://")

    def context(name: str = "") -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
        if name:
            made.load_cert_chain(tmp_path / f"{name}.crt", tmp_path / f"{name}.key")
        return made

    gate.tls = context()
    assert gate.get("/v1/session", headers=bearer(text)).json["name"] == "al"
    assert gate.get("/v1/session").status == 401
    reply = gate.post("/v1/session", {"key": text})
    assert "; Secure" in reply.headers["set-cookie"]
    gate.tls = context("mill")
    assert gate.get("/v1/session").json["role"] == "worker"
    gate.tls = context("eve")
    assert gate.get("/v1/session").status == 401
    gate.tls = context()
    gate.tls.maximum_version = ssl.TLSVersion.TLSv1_2
    assert gate.get("/livez").status == 200


def certificates(folder: Path, *names: str) -> None:
    """Make a CA, and certificates of it."""
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    usage = "keyUsage=critical,keyCertSign,digitalSignature"
    openssl("req", "-x509", *key, "-addext", usage, "-subj", "/CN=ca", "-keyout", "ca.key",
            "-out", "ca.crt")  # fmt: skip
    for name in names:
        openssl("req", "-x509", *key, "-CA", "ca.crt", "-CAkey", "ca.key", "-subj", f"/CN={name}",
                "-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=CA:FALSE",
                "-keyout", f"{name}.key", "-out", f"{name}.crt")  # fmt: skip


def test_payloads_and_tracebacks_are_for_operators(serve: Serve, file: Path) -> None:
    texts = {role: keys.add_key(file, role.value, role) for role in KEY_ROLES}
    gate = serve("--keys", str(file))
    gate.headers = bearer(texts[Role.OPERATOR])
    request_id = gate.submit(["secret"], retries=0)
    granted = gate.take().json
    failed = {"part": 1, "kind": "abandon", "error": "E", "traceback": "deep inside"}
    gate.post("/v1/report", {"ticket": granted["ticket"], "failed": [failed]})
    path = f"/v1/requests/{request_id}"
    for role in KEY_ROLES:
        gate.headers = bearer(texts[role])
        is_operator = role is Role.OPERATOR
        shown = gate.get(f"{path}/payload?part=1")
        assert (shown.status, "secret" in shown.text) == (
            (200, True) if is_operator else (403, False)
        )
        for route in (f"{path}/failures", f"{path}/errors", f"{path}/report.html"):
            told = gate.get(route)
            assert told.status == 200, (role, route)
            sees = is_operator and not route.endswith("html")
            assert ("deep inside" in told.text) == sees, (role, route)
        live = gate.get(f"/v1/live?once&topic=f:{request_id}")
        assert '"samples":[{' in live.text
        assert "deep inside" not in live.text
