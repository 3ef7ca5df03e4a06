"""Links that show one request to whoever has them, and nothing else."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from streamq.gateway import cookies, keys
from streamq.gateway.roles import KEY_ROLES, Role
from streamq.gateway.routes import ROUTES
from tests.conftest import ONE_KIND
from tests.gateway.common import Gate
from tests.gateway.test_roles import bearer, called

SECRET = b"of a gateway"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "streamq.keys"


def test_link_is_good_for_its_request_until_it_is_over() -> None:
    text = cookies.share_of_request(SECRET, "night", "al", 7)
    share = cookies.request_of_share_link(SECRET, text)
    assert share
    assert (share.request, share.by) == ("night", "al")
    assert cookies.request_of_share_link(b"another", text) is None
    assert (
        cookies.request_of_share_link(SECRET, cookies.share_of_request(SECRET, "night", "al", -1))
        is None
    )
    for at in range(0, len(text), 5):
        forged = text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :]
        assert cookies.request_of_share_link(SECRET, forged) is None
    assert cookies.request_of_share_link(SECRET, "") is None


@ONE_KIND
def test_link_shows_one_request_and_changes_nothing(serve: Callable[..., Gate], file: Path) -> None:
    texts = {role: keys.add_key(file, role.value, role) for role in KEY_ROLES}
    gate = serve("--keys", str(file))
    operator, loader = bearer(texts[Role.OPERATOR]), bearer(texts[Role.LOADER])
    gate.headers = operator
    mine, other = gate.submit(["x"]), gate.submit(["y"])
    gate.headers = {}
    path = f"/v1/requests/{mine}/share"
    assert gate.post(path, {}, headers=bearer(texts[Role.READER])).status == 403
    assert gate.post(path, {"days": 400}, headers=loader).status == 400
    assert gate.post("/v1/requests/nothing/share", {}, headers=loader).status == 404
    shared = gate.post(path, {}, headers=loader).json
    assert shared["days"] == 7

    entered = gate.get(shared["path"])
    assert (entered.status, entered.headers["location"]) == (303, f"/r/{mine}")
    cookie = entered.headers["set-cookie"]
    assert re.search(r"HttpOnly; SameSite=Strict", cookie)
    visitor = {"Cookie": cookie.partition(";")[0], "Sec-Fetch-Site": "same-origin"}

    told = gate.get("/v1/me", headers=visitor).json
    assert (told["role"], told["only"], told["queues"]) == ("reader", mine, [])
    assert gate.get(f"/v1/live?once&topic=r:{mine}&topic=m:{mine}", headers=visitor).status == 200
    for topic in (f"r:{other}", f"q:{gate.queue}", f"l:{gate.queue}", f"t:{gate.queue}"):
        assert gate.get(f"/v1/live?once&topic={topic}", headers=visitor).status == 403, topic
    assert gate.get(f"/v1/requests/{mine}/report.html", headers=visitor).status == 200
    assert gate.get(f"/v1/requests/{other}/report.html", headers=visitor).status == 403

    wrong: list[object] = []
    for route in ROUTES:
        for request_id in (mine, other):
            status, code = called(gate, route, request_id, visitor)
            is_let_in = (status, code) != (403, "ROLE")
            is_own = request_id == mine and "{id}" in route.path
            may = Role.READER.allows(route.role) and (is_own or route.is_of_all)
            if is_let_in != may and route.role is not Role.ANYBODY:
                wrong.append((route.method, route.path, request_id == mine, status, code))
    assert wrong == []


@ONE_KIND
def test_forged_link_and_gateway_without_keys(serve: Callable[..., Gate], file: Path) -> None:
    gate = serve()
    request_id = gate.submit(["x"])
    refused = gate.post(f"/v1/requests/{request_id}/share", {})
    assert (refused.status, refused.json["code"]) == (409, "OPEN")
    keys.add_key(file, "al", Role.OPERATOR)
    gate = serve("--keys", str(file))
    assert gate.get(f"/s/{cookies.share_of_request(SECRET, request_id, 'al', 7)}").status == 410
    assert gate.get("/s/nonsense").status == 410
