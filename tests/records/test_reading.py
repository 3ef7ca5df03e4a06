"""The reader of references: which files and URLs a worker reads for others, and which not."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from streamq.app import Abandon
from streamq.errors import InvalidValue
from streamq.model import Spec
from streamq.records import remote
from streamq.records.references import Reference, ReferenceReader
from streamq.records.remote import RemoteChanged, RemoteFile, locate_url, read_range_of_object
from tests.support.web import serve

SECRET = b"a secret"


def spec_of(*, is_whole: bool) -> Spec:
    return Spec(format="file" if is_whole else "lines")


def _of(path: Path) -> bytes:
    state = path.stat()
    return msgspec.json.encode(Reference(0, state.st_size, state.st_size, str(state.st_mtime_ns)))


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("what", ["the file", "its folder"])
def test_link_put_in_place_after_the_check_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, *, is_whole: bool
) -> None:
    inside, outside = tmp_path / "inside" / "sub", tmp_path / "outside"
    inside.mkdir(parents=True)
    outside.mkdir()
    (inside / "a.txt").write_bytes(b"harmless")
    (outside / "a.txt").write_bytes(SECRET)
    os.utime(outside / "a.txt", ns=(0, (inside / "a.txt").stat().st_mtime_ns))
    payload = _of(inside / "a.txt")

    def swapping(then: Callable[..., str]) -> Callable[..., str]:
        def resolve(name: str) -> str:
            resolved = then(name)
            if what == "the file":
                (inside / "a.txt").unlink()
                (inside / "a.txt").symlink_to(outside / "a.txt")
            else:
                inside.rename(tmp_path / "moved")
                inside.symlink_to(outside)
            return resolved

        return resolve

    reader = ReferenceReader([str(tmp_path / "inside")])
    monkeypatch.setattr(os.path, "realpath", swapping(os.path.realpath))

    with pytest.raises(Abandon, match="may not read"):
        reader.read(str(inside / "a.txt"), payload, spec_of(is_whole=is_whole))


def test_whole_file_is_read_from_what_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.write_bytes(SECRET)
    file = inside / "a.txt"
    file.write_bytes(b"harmless")
    payload = _of(file)
    look = os.fstat

    def swapping(descriptor: int) -> os.stat_result:
        state = look(descriptor)
        if not file.is_symlink():
            file.unlink()
            file.symlink_to(outside)
        return state

    monkeypatch.setattr(os, "fstat", swapping)

    assert (
        ReferenceReader([str(inside)]).read(str(file), payload, spec_of(is_whole=True))
        == b"harmless"
    )


def test_one_file_may_be_all_that_is_allowed(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(b"content")
    reader = ReferenceReader([str(tmp_path / "a.txt")])

    assert reader.read(str(tmp_path / "a.txt"), _of(tmp_path / "a.txt"), spec_of(is_whole=True))
    with pytest.raises(Abandon, match="may not read"):
        reader.read(str(tmp_path / "b.txt"), _of(tmp_path / "b.txt"), spec_of(is_whole=True))


#: Ways that lead out of /allowed for one parser or another.
LEADS_OUT = [
    "/allowed/../secret/s.txt",
    "/allowed/%2e%2e/secret/s.txt",
    "/allowed/%2E%2E/secret/s.txt",
    "/allowed/.%2e/secret/s.txt",
    "/allowed/%2e./secret/s.txt",
    "/allowed/%252e%252e/secret/s.txt",
    "/allowed/%25252e./secret/s.txt",
    "/allowed/" + "%25" * 2000 + "2e./secret/s.txt",
    "/allowed/x\\..\\..\\secret/s.txt",
    "/allowed\\..\\secret/s.txt",
    "/allowed/x%5c..%5c..%5csecret/s.txt",
    "/allowed/\t../secret/s.txt",
    "/allowed/.\t./secret/s.txt",
    "/allowed/.\n./secret/s.txt",
    "/allowed/.\r./secret/s.txt",
    "/allowed/%09../secret/s.txt",
    "/allowed/..%2fsecret/s.txt",
    "/allowed/..%2Fsecret%2Fs.txt",
    "/allowed%2f..%2fsecret/s.txt",
    "/allowed/./../secret/s.txt",
    "/allowed//../secret/s.txt",
    "/allowed/.. /secret/s.txt",
    "/allowed/..",
    "/allowed/x/..",
    "//secret/s.txt",
    "/allowed/..;/secret/s.txt?/allowed/",
    "/secret/s.txt?/allowed/a.txt",
    "/secret/s.txt#/allowed/a.txt",
    "/allowed/a.txt?x=/../../secret",
    "/allowed/a.txt#x",
    "/allowedness/s.txt",
    "/secret/s.txt",
    "/Allowed/a.txt",
    "/",
    "",
]


@pytest.mark.parametrize("is_whole", [True, False])
def test_no_spelling_of_a_url_leads_out_of_what_is_allowed(*, is_whole: bool) -> None:
    pytest.importorskip("obstore")
    files = {"secret/s.txt": SECRET, "allowedness/s.txt": SECRET, "allowed/a.txt": b"harmless"}
    with serve(files) as web:
        then = remote.head_of_object(f"{web}/secret/s.txt")
        payload = msgspec.json.encode(Reference(0, len(SECRET), *then))
        reader = ReferenceReader([f"{web}/allowed"])
        read = {}
        for path in LEADS_OUT:
            try:
                read[path] = reader.read(web + path, payload, spec_of(is_whole=is_whole))
            except Abandon:
                continue

    assert read == {}


def test_url_on_another_host_is_not_covered() -> None:
    allowed = locate_url("http://host.example:8080/allowed")
    for url in (
        "http://host.example/allowed/a",
        "http://host.example:80/allowed/a",
        "http://host.example:08080/allowed/a",
        "https://host.example:8080/allowed/a",
        "http://user@host.example:8080/allowed/a",
        "http://host.example:8080@evil.example/allowed/a",
        "http://evil.example/http://host.example:8080/allowed/a",
        "http://host.example.:8080/allowed/a",
        "http://host.example:8080.evil.example/allowed/a",
        "s3://host.example:8080/allowed/a",
    ):
        try:
            assert not allowed.covers(locate_url(url)), url
        except InvalidValue:
            continue


@pytest.mark.parametrize(
    ("allowed", "url"),
    [
        ("http://host/allowed", "HTTP://HOST:80/allowed/a"),
        ("https://Host:443/allowed/", "https://host/allowed/a/b"),
        ("http://host", "http://host/a"),
        ("http://[::1]:80/x", "http://[::1]/x/y"),
        ("http://[::1]:8080/x", "http://[::1]:8080/x/y"),
        ("http://host/my data", "http://host/my%20data/a"),
        ("http://host/a.txt", "http://host/a.txt"),
        ("s3://bucket/2026", "S3://bucket/2026/in.txt"),
        ("s3://bucket", "s3://bucket/a/b"),
        ("gs://bucket/a", "gs://bucket/a/100%/x..y"),
        ("abfss://box@account.example/a", "abfss://box@account.example/a/b"),
    ],
)
def test_spellings_of_the_same_place_are_covered(allowed: str, url: str) -> None:
    assert locate_url(allowed).covers(locate_url(url))


@pytest.mark.parametrize(
    ("allowed", "url"),
    [
        ("s3://bucket/a", "s3://bucket/a/../b"),
        ("s3://bucket/a", "s3://bucket/a/%2e%2e/b"),
        ("s3://bucket/a", "s3://bucket/a\\..\\b"),
        ("s3://bucket/a", "s3://bucket/a//b"),
        ("s3://bucket/a", "s3://Bucket/a/b"),
        ("s3://bucket/a", "s3://bucket:80/a/b"),
        ("s3://bucket/a", "s3://x@bucket/a/b"),
        ("s3://bucket/a", "s3a://bucket/a/b"),
        ("gs://bucket/a b", "gs://bucket/a%20b/c"),
        ("az://box/a", "az://box/ab"),
        ("az://box/a", "az:///box/a/b"),
    ],
)
def test_places_in_a_cloud_are_compared_as_they_are_written(allowed: str, url: str) -> None:
    with pytest.raises((InvalidValue, AssertionError)):
        assert locate_url(allowed).covers(locate_url(url))


def test_names_that_are_encoded_are_read_under_their_own_name() -> None:
    pytest.importorskip("obstore")
    files = {"my%20data/100%25%20sure.txt": b"content"}
    with serve(files) as web:
        for name in ("my%20data/100%25%20sure.txt", "my data/100% sure.txt"):
            then = remote.head_of_object(f"{web}/{name}")
            payload = msgspec.json.encode(Reference(0, 7, *then))
            reader = ReferenceReader([f"{web}/my%20data"])
            for is_whole in (True, False):
                assert (
                    reader.read(f"{web}/{name}", payload, spec_of(is_whole=is_whole)) == b"content"
                )


@pytest.mark.parametrize("after", [b"other CONTENT", b"short", b""])
def test_object_replaced_between_the_look_and_the_read_is_told_as_changed(
    monkeypatch: pytest.MonkeyPatch, after: bytes
) -> None:
    pytest.importorskip("obstore")
    files = {"a.txt": b"first content"}
    with serve(files) as web:
        url = f"{web}/a.txt"
        then = remote.head_of_object(url)
        looked = remote.head_of_object

        def swapping(name: str) -> remote.Object:
            found = looked(name)
            files["a.txt"] = after
            return found

        monkeypatch.setattr(remote, "head_of_object", swapping)
        with suppress(RemoteChanged):
            assert read_range_of_object(url, 6, 7, then) == b"content"
        files["a.txt"] = after
        with pytest.raises(RemoteChanged):
            read_range_of_object(url, 6, 7, then)
        files["a.txt"] = b"first content"
        with pytest.raises(RemoteChanged, match="has changed"):
            RemoteFile(url).read(100)


def test_empty_range_is_of_the_same_object_too() -> None:
    pytest.importorskip("obstore")
    files = {"a.txt": b"content"}
    with serve(files) as web:
        then = remote.head_of_object(f"{web}/a.txt")
        assert read_range_of_object(f"{web}/a.txt", 3, 0, then) == b""
        files["a.txt"] = b"another"
        with pytest.raises(RemoteChanged):
            read_range_of_object(f"{web}/a.txt", 3, 0, then)


def test_reference_to_more_than_a_file_has_takes_no_more_memory_than_the_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.txt").write_bytes(b"little")
    payload = msgspec.json.encode(Reference(0, 2**50, 2**50, "made up", 1))

    with pytest.raises(Abandon, match="cut short"):
        ReferenceReader([str(tmp_path)]).read(
            str(tmp_path / "a.txt"), payload, Spec(format="lines")
        )
