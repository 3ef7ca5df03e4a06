"""The files of the pages: small, whole, from nowhere else, and text only as text."""

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from streamq.dashboard.files import dashboard_pages

STATIC = Path(__file__).parents[2] / "streamq" / "dashboard" / "static"
MODULES = sorted(STATIC.glob("*.js"))
OWN = [path for path in MODULES if path.name != "lit-html.js"]


def test_all_files_together_are_at_most_100_kb() -> None:
    loaded = [path for path in STATIC.iterdir() if path.suffix != ".txt"]
    assert sum(path.stat().st_size for path in loaded) <= 100_000


def test_vendored_file_is_the_one_that_is_named() -> None:
    said = (STATIC / "LICENSES.txt").read_text()
    content = (STATIC / "lit-html.js").read_bytes()
    assert hashlib.sha256(content).hexdigest() in said
    assert re.search(r"lit-html \d+\.\d+\.\d+ ", said)
    assert "BSD" in said


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_modules_are_javascript(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / f"{path.stem}.mjs"
    copy.write_bytes(path.read_bytes())
    subprocess.run(["node", "--check", str(copy)], check=True, capture_output=True)


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_modules_import_files_beside_them_and_make_no_html_of_text(path: Path) -> None:
    text = path.read_text()
    for name in re.findall(r"(?:from|import)\s*\(?'([^']+)'", text):
        assert name.startswith("./")
        assert (STATIC / name).is_file()
    for banned in ("unsafeHTML", "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write"):
        assert banned not in text
    assert not re.search(r"\beval\(|new Function|https?://", text)
    # A style attribute is refused by the policy of the pages: the property is set instead.
    assert not re.search(r"[^.]style=[\"$]", text)


def test_page_names_files_that_are_there() -> None:
    found = dashboard_pages()
    index = found.index.decode()
    names = re.findall(rf"/static/{found.digest}/([\w.-]+)", index)
    # All modules are named, so that a browser need not find one in the other.
    assert set(names) == found.files.keys() - {"LICENSES.txt"}
    assert "{{" not in index
    assert "<script>" not in index
    assert json.dumps(sorted(found.files))
