"""``streamq run`` into an object behind a URL, on a server that speaks as much S3 as that takes."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs.running import EMBEDDED, Streamq
from tests.support.web import Login, serve

pytestmark = [pytest.mark.commands, EMBEDDED]

CODE = """
def same(line: bytes) -> bytes:
    return line
def picky(line: str) -> str:
    if line == "line 7":
        raise ValueError("seven")
    return line
"""
DATA = b"".join(b"line %d\n" % n for n in range(1_000))
RUN = ("run", "in.txt", "-p", "1", "--retries", "0")


@pytest.fixture
def objects(environment: dict[str, str], tmp_path: Path) -> Iterator[dict[str, bytes]]:
    """What an S3 has, to which commands have the credentials."""
    (tmp_path / "made.py").write_text(CODE)
    (tmp_path / "in.txt").write_bytes(DATA)
    found: dict[str, bytes] = {}
    login = Login("key", "secret")
    with serve(found, login) as url:
        environment |= {
            "AWS_ACCESS_KEY_ID": login.key,
            "AWS_SECRET_ACCESS_KEY": login.secret,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": url,
            "AWS_ALLOW_HTTP": "true",
            # Whatever goes wrong, nothing asks another machine.
            "AWS_METADATA_ENDPOINT": "http://127.0.0.1:1",
        }
        yield found


def test_the_output_is_uploaded_when_it_is_complete(
    streamq: Streamq, objects: dict[str, bytes], tmp_path: Path
) -> None:
    done = streamq(*RUN, "--map", "made.py:same", "-o", "s3://stock/2026/out.txt.gz", "--json")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["output"] == "s3://stock/2026/out.txt.gz"
    assert gzip.decompress(objects["stock/2026/out.txt.gz"]) == DATA
    assert not (tmp_path / "out.txt.gz").exists()
    assert not (tmp_path / ".streamq").exists()


def test_an_object_that_is_there_is_replaced_only_by_force(
    streamq: Streamq, objects: dict[str, bytes]
) -> None:
    objects["stock/out.txt"] = b"precious"
    words = (*RUN, "--map", "made.py:same", "-o", "s3://stock/out.txt")

    refused = streamq(*words)

    assert refused.returncode == 2
    assert "s3://stock/out.txt exists: remove it, or say --force" in refused.stderr
    assert objects["stock/out.txt"] == b"precious"
    assert streamq(*words, "--force").returncode == 0
    assert objects["stock/out.txt"] == DATA


def test_what_cannot_be_uploaded_is_not_lost(
    streamq: Streamq, objects: dict[str, bytes], environment: dict[str, str], tmp_path: Path
) -> None:
    words = (*RUN, "--map", "made.py:same", "-o", "s3://stock/out.txt")
    secret = environment["AWS_SECRET_ACCESS_KEY"]
    environment["AWS_SECRET_ACCESS_KEY"] = "wrong"

    failed = streamq(*words)

    assert failed.returncode != 0
    assert "s3://stock/out.txt" in failed.stderr
    assert (tmp_path / "out.txt").read_bytes() == DATA
    assert not objects
    environment["AWS_SECRET_ACCESS_KEY"] = secret
    done = streamq(*words)
    assert done.returncode == 0, done.stderr
    assert "going on with run" in done.stderr
    assert objects["stock/out.txt"] == DATA
    assert not (tmp_path / "out.txt").exists()
    assert not (tmp_path / ".streamq").exists()


def test_failures_are_uploaded_and_gone_after_a_retry(
    streamq: Streamq, objects: dict[str, bytes], tmp_path: Path
) -> None:
    done = streamq(*RUN, "--map", "made.py:picky", "-o", "s3://stock/out.txt")

    assert done.returncode == 1, done.stderr
    assert objects["stock/out.txt"] == DATA.replace(b"line 7\n", b"")
    assert b"seven" in objects["stock/out.errors.jsonl"]

    (tmp_path / "made.py").write_text(CODE.replace("line 7", "no line"))
    assert streamq("run", "--retry-failed", "last").returncode == 0

    assert objects == {"stock/out.txt": DATA}


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://127.0.0.1:1/out.txt", "nothing can be written to a web server"),
        ("s3://stock/2026/", "is a folder: name the object"),
        ("s3://stock/out.zip", ".zip is not written"),
    ],
)
def test_what_is_no_object_is_refused(
    streamq: Streamq, objects: dict[str, bytes], url: str, why: str
) -> None:
    refused = streamq(*RUN, "--map", "made.py:same", "-o", url)

    assert refused.returncode == 2
    assert why in refused.stderr
    assert not objects
