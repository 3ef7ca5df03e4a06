"""The clients of other languages are short enough to be read before they are copied."""

from tests.clients.conftest import CLIENTS


def test_files_to_copy_are_short() -> None:
    files = [each for each in CLIENTS.rglob("*") if each.suffix in (".js", ".go", ".sh")]
    assert {each.name for each in files} >= {"worker.js", "worker.go", "worker.sh", "load.sh"}
    assert [each for each in files if len(each.read_text().splitlines()) >= 200] == []
