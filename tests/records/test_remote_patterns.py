"""Patterns and folders behind URLs, on a server that lists what it has as S3 does."""

from collections.abc import Iterator

import pytest

from streamq.errors import InvalidValue
from streamq.records import remote
from streamq.records.names import expand_file_names
from tests.support.web import Login, serve

NAMES = (
    "in/a.csv",
    "in/b.csv",
    "in/deep/c.csv",
    "in/.hidden/x.csv",
    "in/.y.csv",
    "in/my data.txt",
    "inner/a.csv",
    "other.csv",
)


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The bucket ``stock`` with these names, and credentials for nothing else."""
    login = Login("key", "secret")
    with serve({f"stock/{name}": b"1" for name in NAMES}, login) as url:
        for name, value in {
            "AWS_ACCESS_KEY_ID": login.key,
            "AWS_SECRET_ACCESS_KEY": login.secret,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": url,
            "AWS_ALLOW_HTTP": "true",
            # Whatever goes wrong, nothing asks another machine.
            "AWS_METADATA_ENDPOINT": "http://127.0.0.1:1",
        }.items():
            monkeypatch.setenv(name, value)
        remote._store_of_folder.cache_clear()
        yield
        remote._store_of_folder.cache_clear()


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("in/*.csv", ["in/a.csv", "in/b.csv"]),
        ("in/", ["in/a.csv", "in/b.csv", "in/deep/c.csv", "in/my data.txt"]),
        ("in/**", ["in/a.csv", "in/b.csv", "in/deep/c.csv", "in/my data.txt"]),
        ("**/*.csv", ["in/a.csv", "in/b.csv", "in/deep/c.csv", "inner/a.csv", "other.csv"]),
        ("*.csv", ["other.csv"]),
        ("i*/a.csv", ["in/a.csv", "inner/a.csv"]),
        ("in/*/c.csv", ["in/deep/c.csv"]),
        ("in/.*.csv", ["in/.y.csv"]),
        ("in/a.csv", ["in/a.csv"]),
    ],
)
def test_a_pattern_names_the_objects_that_fit_it(pattern: str, found: list[str]) -> None:
    names = expand_file_names([f"s3://stock/{pattern}"])

    assert names == [f"s3://stock/{name}" for name in found]


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(InvalidValue, match="matches no object"):
        expand_file_names(["s3://stock/in/*.parquet"])


def test_a_web_server_is_not_asked_what_it_has() -> None:
    url = "https://127.0.0.1:1/in/*.csv"

    assert expand_file_names([url]) == [url]
