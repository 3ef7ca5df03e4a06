"""Settings from the environment."""

from pathlib import Path

import pytest

from streamq import Settings, SettingsError


def test_without_variables_everything_has_its_default() -> None:
    settings = Settings.from_env({})

    assert settings == Settings()
    assert (settings.url, settings.queue, settings.prefix) == ("", "default", "sq")


def test_every_setting_has_a_variable() -> None:
    env = {
        "STREAMQ_URL": "redis://h",
        "STREAMQ_PREFIX": "p",
        "STREAMQ_QUEUE": "q",
        "STREAMQ_LEASE_MS": "9000",
        "STREAMQ_BEAT_MS": "3000",
        "STREAMQ_AUDIT_MS": "1000",
    }

    settings = Settings.from_env(env)

    assert {f"STREAMQ_{name.upper()}" for name in Settings.__struct_fields__} == set(env)
    assert settings == Settings(
        url="redis://h", prefix="p", queue="q", lease_ms=9_000, beat_ms=3_000, audit_ms=1_000
    )


def test_url_from_a_file_unless_it_is_given(tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text("redis://:secret@h\n")
    env = {"STREAMQ_URL_FILE": str(file), "REDIS_URL": "redis://other"}

    assert Settings.from_env(env).url == "redis://:secret@h"
    assert Settings.from_env({**env, "STREAMQ_URL": "redis://given"}).url == "redis://given"


def test_url_from_the_names_others_use() -> None:
    env = {"VALKEY_URL": "valkey://v"}

    assert Settings.from_env(env).url == "valkey://v"
    assert Settings.from_env({**env, "REDIS_URL": "redis://r"}).url == "redis://r"


def test_an_empty_variable_is_as_good_as_none() -> None:
    env = {"STREAMQ_URL": "", "STREAMQ_LEASE_MS": "", "REDIS_URL": "redis://r"}

    settings = Settings.from_env(env)

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
