"""Settings: from variables and files, in their order, with their origin."""

import json
from pathlib import Path
from typing import Any

import pytest

from streamq import Settings, SettingsError
from streamq.settings import FIELDS, gather_settings, url_with_login, variable_of
from tests.support.command import run


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    """A folder without any file of settings in it or above it."""
    folder = tmp_path / "project" / "deep"
    folder.mkdir(parents=True)
    return folder


def test_without_anything_everything_has_its_default(nowhere: Path) -> None:
    gathered = gather_settings({}, nowhere)

    assert gathered.settings == Settings()
    assert set(gathered.origins.values()) == {"default"}
    settings = gathered.settings
    assert (settings.url, settings.queue, settings.prefix) == ("", "default", "sq")


def test_every_setting_has_a_variable_and_a_key(nowhere: Path) -> None:
    given: dict[str, Any] = {
        "url": "redis://h",
        "username": "u",
        "password": "p",
        "key": "k",
        "tls_ca_file": "/ca",
        "tls_cert_file": "/cert",
        "tls_key_file": "/key",
        "insecure": True,
        "prefix": "p",
        "queue": "q",
        "team": "t",
        "patience_ms": 1500,
        "lease_ms": 9000,
        "beat_ms": 3000,
        "audit_ms": 1000,
        "processes": 2,
        "concurrency": 3,
        "grace": "5s",
        "health_port": "8080",
        "log_level": "debug",
        "log_format": "json",
    }
    env = {variable_of(name): str(value) for name, value in given.items()}
    (nowhere / "streamq.toml").write_text(
        "".join(
            f"{k} = {json.dumps(v)}\n" for k, v in given.items() if k not in ("password", "key")
        )
    )

    assert set(given) == set(FIELDS)
    assert Settings.from_env(env, nowhere) == Settings(**given)
    assert Settings.from_env({"STREAMQ_PASSWORD": "p", "STREAMQ_KEY": "k"}, nowhere) == Settings(
        **given
    )


@pytest.mark.parametrize(("text", "ms"), [("9000", 9_000), ("9s", 9_000), ("1m 30 sec", 90_000)])
def test_a_time_is_milliseconds_or_has_a_unit(text: str, ms: int, nowhere: Path) -> None:
    assert Settings.from_env({"STREAMQ_LEASE_MS": text}, nowhere).lease_ms == ms
    (nowhere / "streamq.toml").write_text(f'lease_ms = "{text}"\n')
    assert Settings.from_env({}, nowhere).lease_ms == ms


def test_the_stronger_source_wins(nowhere: Path, tmp_path: Path) -> None:
    user = tmp_path / "xdg" / "streamq"
    user.mkdir(parents=True)
    env = {"XDG_CONFIG_HOME": str(tmp_path / "xdg"), "REDIS_URL": "redis://other"}
    project = nowhere.parent / "pyproject.toml"

    def url() -> tuple[str, str]:
        gathered = gather_settings(env, nowhere)
        return gathered.settings.url, gathered.origins["url"]

    assert url() == ("redis://other", "REDIS_URL")
    (user / "config.toml").write_text('url = "redis://user"\nqueue = "u"\n')
    assert url() == ("redis://user", str(user / "config.toml"))
    project.write_text('[tool.streamq]\nurl = "redis://project"\n')
    assert url() == ("redis://project", str(project))
    (nowhere / "streamq.toml").write_text('url = "redis://nearest"\n')
    assert url() == ("redis://nearest", str(nowhere / "streamq.toml"))
    env["STREAMQ_CONFIG"] = str(project)
    assert url() == ("redis://project", str(project))
    env["STREAMQ_URL"] = "redis://variable"
    assert url() == ("redis://variable", "STREAMQ_URL")
    assert Settings.from_env(env, nowhere).queue == "u", "what nobody else says"


@pytest.mark.slow
def test_a_command_reads_them_too_and_its_options_win(nowhere: Path, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('queue = "from-file"\nurl = "redis://127.0.0.1:1"\nlog_level = "shout"\n')

    shown = run("config", "show", "--origin", "--config", str(file), STREAMQ_QUEUE="from-env")
    wrong = run("janitor", "--once", "--config", str(file))
    right = run("janitor", "--once", "--config", str(file), "--log-level", "error")

    rows = {line.split()[0]: line.split()[1:] for line in shown.stdout.splitlines()}
    assert rows["queue"] == ["from-env", "STREAMQ_QUEUE"]
    assert rows["url"] == ["redis://127.0.0.1:1", str(file)]
    assert (wrong.returncode, right.returncode) == (2, 3)
    assert "shout" in wrong.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('ulr = "x"', "did you mean url"),
        ("leese_ms = 5", "did you mean lease_ms"),
        ("zebra = 1", "there are url"),
        ('password = "hush"', "password_file"),
        ("processes = 1.5", "processes in"),
        ("processes = true", "processes in"),
        ("queue = 7", "queue in"),
        ('insecure = "maybe"', "insecure in"),
        ("url = ", "is not TOML"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_what_is(nowhere: Path, text: str, says: str) -> None:
    file = nowhere / "streamq.toml"
    file.write_text(text)

    with pytest.raises(SettingsError, match=says) as failure:
        gather_settings({}, nowhere)

    assert str(file) in str(failure.value)
    assert "hush" not in str(failure.value)


@pytest.mark.slow
def test_a_wrong_file_is_one_line_of_every_command(tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text("ulr = 1")

    for words in (["ls"], ["config", "show"], ["worker", "tasks:app"]):
        ran = run(*words, "--config", str(file))
        assert ran.returncode == 2
        assert len(ran.stderr.splitlines()) == 1
    assert run("ls", "--config", str(tmp_path / "none")).returncode == 2


def test_url_and_password_from_a_file_unless_they_are_given(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("redis://:secret@h\n")
    (tmp_path / "password").write_text("s3cret\n")
    env = {"STREAMQ_URL_FILE": str(tmp_path / "url"), "REDIS_URL": "redis://other"}
    (tmp_path / "streamq.toml").write_text('password_file = "password"\n')

    assert Settings.from_env(env, tmp_path).url == "redis://:secret@h"
    assert Settings.from_env(env, tmp_path).password == "s3cret"
    assert Settings.from_env({**env, "STREAMQ_URL": "redis://given"}).url == "redis://given"


@pytest.mark.parametrize(
    ("url", "full"),
    [
        ("redis://h/1", "redis://me:p%2Fw@h/1"),
        ("redis://you@h", "redis://you:p%2Fw@h"),
        ("redis://you:own@h", "redis://you:own@h"),
        ("redis://h?password=own", "redis://h?password=own"),
        ("rediss://h", "rediss://me:p%2Fw@h?ssl_ca_certs=/ca"),
        ("rediss://h?db=1", "rediss://me:p%2Fw@h?db=1&ssl_ca_certs=/ca"),
        ("rediss://h?ssl_ca_certs=/own", "rediss://me:p%2Fw@h?ssl_ca_certs=/own"),
        ("unix:///s", "unix://me:p%2Fw@/s"),
        ("redis+cluster://a,b", "redis+cluster://me:p%2Fw@a,b"),
        ("local://", "local://"),
        ("", ""),
    ],
)
def test_url_is_completed_by_what_it_does_not_say(url: str, full: str) -> None:
    assert url_with_login(url, Settings(username="me", password="p/w", tls_ca_file="/ca")) == full


def test_url_from_the_names_others_use(nowhere: Path) -> None:
    env = {"VALKEY_URL": "valkey://v"}

    assert Settings.from_env(env, nowhere).url == "valkey://v"
    assert Settings.from_env({**env, "REDIS_URL": "redis://r"}, nowhere).url == "redis://r"


def test_an_empty_variable_is_as_good_as_none(nowhere: Path) -> None:
    env = {"STREAMQ_URL": "", "STREAMQ_LEASE_MS": "", "REDIS_URL": "redis://r"}

    settings = Settings.from_env(env, nowhere)

    assert (settings.url, settings.lease_ms) == ("redis://r", Settings().lease_ms)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("STREAMQ_LEASE_MS", "soon"),
        ("STREAMQ_LEASE_MS", "1.5"),
        ("STREAMQ_LEASE_MS", "0"),
        ("STREAMQ_AUDIT_MS", "-1"),
        ("STREAMQ_QUEUE", "a}b"),
        ("STREAMQ_PREFIX", "a b"),
        ("STREAMQ_INSECURE", "perhaps"),
    ],
)
def test_a_bad_value_names_its_variable(variable: str, value: str) -> None:
    with pytest.raises(SettingsError, match=variable):
        Settings.from_env({variable: value})


def test_a_heartbeat_that_comes_after_the_lease_is_refused() -> None:
    with pytest.raises(SettingsError, match="STREAMQ_BEAT_MS"):
        Settings.from_env({"STREAMQ_BEAT_MS": "9000", "STREAMQ_LEASE_MS": "9000"})


def test_a_file_that_cannot_be_read_is_named_and_not_shown(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="STREAMQ_URL_FILE"):
        Settings.from_env({"STREAMQ_URL_FILE": str(tmp_path / "none")})

    file = tmp_path / "url"
    file.write_bytes(b"redis://:secret\xff@h")
    with pytest.raises(SettingsError, match="STREAMQ_URL_FILE") as failure:
        Settings.from_env({"STREAMQ_URL_FILE": str(file)})
    assert "secret" not in str(failure.value)
