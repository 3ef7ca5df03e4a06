"""The file with keys: what it says, what it must not, and who is known by it."""

import datetime
import os
import re
import time
from pathlib import Path

import pytest

from streamq.errors import InvalidValue, SettingsError
from streamq.gateway import cookies, keys
from streamq.gateway.access import Access, FailedLogins, Visit
from streamq.gateway.keys import Keys
from streamq.gateway.problems import Problem
from streamq.gateway.roles import KEY_ROLES, LOCAL, Role
from streamq.gateway.routes import ROUTES
from tests.support.command import run

HERE = {"host": "127.0.0.1:8470"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "streamq.keys"


def bearer(text: str) -> Visit:
    return Visit("POST", {"authorization": f"Bearer {text}", "host": "service"}, "10.0.0.1")


class TestFile:
    def test_key_is_found_by_its_text_and_not_in_the_file(self, path: Path) -> None:
        text = keys.add_key(path, "al", Role.WORKER, ["default"], 60)
        assert re.fullmatch(r"sqk_[\w-]{43}", text)
        assert text not in path.read_text()
        assert path.stat().st_mode & 0o777 == 0o600
        found = Keys(keys.read_key_file(path)).find(text)
        assert found
        assert (found.name, found.role, found.queues) == ("al", Role.WORKER, ["default"])

    def test_secret_stays_and_other_lines_too(self, path: Path) -> None:
        keys.add_key(path, "al", Role.WORKER)
        path.write_text(path.read_text() + "# of Al, who left\n")
        before = keys.read_key_file(path).secret
        keys.add_key(path, "bo", Role.READER)
        assert keys.read_key_file(path).secret == before
        assert "# of Al, who left\n" in path.read_text()
        assert [key.name for key in keys.read_key_file(path).keys] == ["al", "bo"]

    def test_two_of_a_name_are_refused(self, path: Path) -> None:
        keys.add_key(path, "al", Role.WORKER)
        with pytest.raises(InvalidValue, match="has a key al already"):
            keys.add_key(path, "al", Role.READER)

    def test_expired_key_is_unknown(self, path: Path) -> None:
        text = keys.add_key(path, "al", Role.WORKER, expires_s=-1)
        assert Keys(keys.read_key_file(path)).find(text) is None
        assert Keys(keys.read_key_file(path)).named("al") is None

    @pytest.mark.parametrize("mode", [0o604, 0o620, 0o666])
    def test_file_that_others_may_read_is_refused(self, path: Path, mode: int) -> None:
        keys.add_key(path, "al", Role.WORKER)
        path.chmod(mode)
        with pytest.raises(SettingsError, match="chmod 600"):
            keys.read_key_file(path)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "secret = 'short'",
            "secret = '" + "0" * 64 + "'\n[[keys]]\nname='a'\nrole='admin'",
            "secret = '" + "0" * 64 + "'\n[[keys]]\nname='a'\nrole='anybody'",
            "secret = '" + "0" * 64 + "'\n[[keys]]\nname='a b'\nrole='reader'",
            "secret = '" + "0" * 64 + "'\n[[keys]]\nname='a'\nrole='reader'\nqueue='q'",
            "secret = '" + "0" * 64 + "'\n[[keys]]\nname='a'\nrole='reader'\nexpires=2020-01-01",
            "secret = '" + "0" * 64 + "'\n" + "[[keys]]\nname='a'\nrole='reader'\n" * 2,
            "\xff",
        ],
    )  # fmt: skip
    def test_file_that_says_what_cannot_be(self, path: Path, text: str) -> None:
        path.write_bytes(text.encode("latin-1"))
        path.chmod(0o600)
        with pytest.raises(SettingsError, match=re.escape(str(path))):
            keys.read_key_file(path)


class TestAccess:
    def test_key_in_the_header_says_who_calls(self, path: Path) -> None:
        text = keys.add_key(path, "al", Role.LOADER, ["a", "b"])
        caller = Access(path).caller(bearer(text))
        assert (caller.name, caller.role) == ("al", Role.LOADER)
        assert caller.queues == frozenset({"a", "b"})

    @pytest.mark.parametrize(
        "authorization", ["", "Bearer", "Bearer sqk_x", "Basic YTpi", "bearer \xff"]
    )
    def test_whoever_does_not_say_is_refused(self, path: Path, authorization: str) -> None:
        keys.add_key(path, "al", Role.LOADER)
        visit = Visit("POST", {"authorization": authorization, **HERE})
        with pytest.raises(Problem) as refused:
            Access(path).caller(visit)
        assert refused.value.status == 401

    def test_key_that_was_taken_away_ends_and_a_new_one_counts(self, path: Path) -> None:
        al = keys.add_key(path, "al", Role.LOADER)
        access = Access(path)
        assert access.caller(bearer(al)).name == "al"
        path.unlink()
        bo = keys.add_key(path, "bo", Role.READER)
        access.look_again()
        assert access.caller(bearer(bo)).name == "bo"
        with pytest.raises(Problem):
            access.caller(bearer(al))

    def test_keys_stay_while_the_file_cannot_be_read(self, path: Path) -> None:
        al = keys.add_key(path, "al", Role.LOADER)
        access = Access(path)
        path.write_text("half a fi")
        access.look_again()
        assert access.caller(bearer(al)).name == "al"

    def test_new_secret_is_told(self, path: Path) -> None:
        keys.add_key(path, "al", Role.LOADER)
        access = Access(path)
        told: list[bytes] = []
        access.on_secret = told.append
        path.unlink()
        keys.add_key(path, "al", Role.LOADER)
        access.look_again()
        access.caller(Visit("GET", {**HERE}, certificate="al"))
        assert told == [bytes.fromhex(keys.read_key_file(path).secret)]

    def test_certificate_has_the_name_of_a_key(self, path: Path) -> None:
        keys.add_key(path, "al", Role.WORKER)
        assert Access(path).caller(Visit("POST", HERE, certificate="al")).name == "al"
        with pytest.raises(Problem):
            Access(path).caller(Visit("POST", HERE, certificate="eve"))

    def test_too_many_wrong_keys_of_an_address_are_told_to_wait(self, path: Path) -> None:
        al = keys.add_key(path, "al", Role.WORKER)
        access = Access(path)
        statuses = []
        for _ in range(12):
            with pytest.raises(Problem) as refused:
                access.caller(bearer("sqk_wrong"))
            statuses.append(refused.value.status)
        assert statuses == [401] * 10 + [429] * 2
        assert 0 < refused.value.retry_after_s <= 60
        assert access.caller(bearer(al)).name == "al"
        assert FailedLogins().add("another").status == 401


class TestPages:
    def test_without_keys_everybody_at_home_is_let_in(self) -> None:
        for host in ("127.0.0.1:8470", "localhost:1", "[::1]:8470", "LOCALHOST", "10.1.2.3"):
            assert Access().caller(Visit("POST", {"host": host})) is LOCAL

    @pytest.mark.parametrize(
        "host", ["evil.example", "evil.example:8470", "", "127.0.0.1.evil.example", "a@localhost"]
    )
    def test_name_that_is_not_ours_is_refused(self, host: str) -> None:
        with pytest.raises(Problem) as refused:
            Access().caller(Visit("GET", {"host": host}))
        assert (refused.value.status, refused.value.code) == (421, "HOST")

    def test_names_that_were_given_are_ours(self) -> None:
        access = Access(hosts=frozenset({"mill"}), origin="https://queue.example")
        for host in ("mill:8470", "queue.example"):
            assert access.caller(Visit("GET", {"host": host})) is LOCAL

    @pytest.mark.parametrize(
        "headers",
        [
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
            {"sec-fetch-site": "cross-site", "origin": "http://127.0.0.1:8470"},
            {"origin": "http://evil.example"},
            {"origin": "null"},
        ],
    )
    def test_page_of_another_site_changes_nothing(self, headers: dict[str, str]) -> None:
        with pytest.raises(Problem) as refused:
            Access().caller(Visit("POST", HERE | headers))
        assert (refused.value.status, refused.value.code) == (403, "SITE")

    def test_our_own_page_may(self) -> None:
        for headers in ({"sec-fetch-site": "same-origin"}, {"origin": "http://127.0.0.1:8470"}):
            assert Access().caller(Visit("POST", HERE | headers)) is LOCAL
        behind = Access(origin="https://queue.example")
        visit = Visit("POST", HERE | {"origin": "https://queue.example"})
        assert behind.caller(visit) is LOCAL


class TestSessions:
    def test_cookie_stands_for_the_key(self, path: Path) -> None:
        text = keys.add_key(path, "al", Role.OPERATOR)
        access = Access(path)
        _, cookie = access.log_in(Visit("POST", HERE), text)
        visit = Visit("GET", HERE | {"cookie": f"other=1; {cookies.COOKIE}={cookie}"})
        assert access.caller(visit).name == "al"
        page = HERE | {"sec-fetch-site": "cross-site", "cookie": f"{cookies.COOKIE}={cookie}"}
        with pytest.raises(Problem, match="SITE"):
            access.caller(Visit("POST", page))

    def test_every_changed_character_ends_it(self, path: Path) -> None:
        text = keys.add_key(path, "al", Role.OPERATOR)
        found = Keys(keys.read_key_file(path))
        key = found.find(text)
        assert key
        cookie = cookies.cookie_of(found, key)
        assert cookies.key_of_cookie(found, cookie) == key
        for place, letter in enumerate(cookie):
            other = "A" if letter != "A" else "B"
            forged = cookie[:place] + other + cookie[place + 1 :]
            is_last = place == len(cookie) - 1  # its last bits stand for nothing
            assert cookies.key_of_cookie(found, forged) is None or is_last
        for wrong in ("", ".", "a.b", cookie + "x", "\xff.x"):
            assert cookies.key_of_cookie(found, wrong) is None

    def test_it_ends_with_its_time_and_with_its_key(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = keys.add_key(path, "al", Role.OPERATOR)
        found = Keys(keys.read_key_file(path))
        key = found.find(text)
        assert key
        cookie = cookies.cookie_of(found, key)
        file = keys.read_key_file(path)
        other = keys.Key(name="al", role=Role.OPERATOR, sha256=keys.digest_of_key("another"))
        assert (
            cookies.key_of_cookie(Keys(keys.KeyFile(secret=file.secret, keys=[other])), cookie)
            is None
        )
        assert cookies.key_of_cookie(Keys(keys.KeyFile(secret=file.secret)), cookie) is None
        later = time.time() + cookies.SESSION_S + 1
        monkeypatch.setattr(time, "time", lambda: later)
        assert cookies.key_of_cookie(found, cookie) is None


def test_roles() -> None:
    assert {(a.value, b.value) for a in KEY_ROLES for b in KEY_ROLES if a.allows(b)} == {
        *((role.value, "reader") for role in KEY_ROLES),
        *(("operator", role.value) for role in KEY_ROLES),
        ("worker", "worker"),
        ("loader", "loader"),
    }


def test_group_of_the_file_stays(path: Path) -> None:
    keys.add_key(path, "al", Role.WORKER)
    group = path.stat().st_gid
    keys.add_key(path, "bo", Role.WORKER)
    assert path.stat().st_gid == group == os.getgid()


def test_end_is_in_the_file_with_its_zone(path: Path) -> None:
    keys.add_key(path, "al", Role.WORKER, expires_s=86_400)
    (key,) = keys.read_key_file(path).keys
    assert key.expires
    assert key.expires.tzinfo == datetime.UTC


@pytest.mark.parametrize("words", [("al",), ("a l", "--role", "reader"), ("--role", "reader")])
def test_bad_key_command(words: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "k"
    assert run("serve", "key", *words, "--keys", str(file)).returncode == 2
    assert not file.exists()


def test_roles_of_the_routes_are_these() -> None:
    # A route that is for more people than it was shows here, and has to be meant.
    by_role: dict[Role, set[str]] = {}
    for route in ROUTES:
        by_role.setdefault(route.role, set()).add(route.name)
    assert by_role == {
        Role.ANYBODY: {"healthz", "livez", "log_in", "readyz"},
        Role.READER: {
            "changes",
            "errors",
            "failures",
            "log_out",
            "me",
            "openapi_json",
            "proto",
            "queues",
            "requests",
            "status",
            "uploaded",
            "version",
            "wait",
            "whoami",
        },
        Role.WORKER: {"beat", "leave", "report", "take"},
        Role.LOADER: {
            "append",
            "commit",
            "results",
            "seal",
            "share",
            "submit",
            "upload",
            "upload_rest",
        },
        Role.OPERATOR: {
            "cancel",
            "change",
            "pause",
            "payload",
            "purge",
            "release",
            "resume",
            "retry",
            "retry_some",
        },
    }
