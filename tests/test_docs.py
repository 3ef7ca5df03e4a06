"""The documents: links lead somewhere, the reference is not stale, the tutorial runs."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")])
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def _anchors(page: Path) -> set[str]:
    """What a forge makes of the headings."""
    text = _BLOCK.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in _LINK.findall(_BLOCK.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_document_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()

    assert [page.name for page in ROOT.glob("docs/*.md") if f"({page.name})" not in index] == [
        "README.md"
    ]


def test_reference_is_of_this_code() -> None:
    command = [sys.executable, "-m", "docs.generate", "--print"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert made == (ROOT / "docs" / "reference.md").read_text(), "stale: make docs"


def test_commands_of_the_tutorial_run(tmp_path: Path) -> None:
    script = ["set -eu", "trap 'kill $(jobs -p)' EXIT"]
    for language, body in _BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text()):
        named = re.match(r"# (\w+\.py)\n", body)
        if language == "python":
            assert named, "a file of the tutorial begins with its name"
            (tmp_path / named[1]).write_text(body)
        elif language == "sh":
            script.append(body)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STREAMQ_")}
    programs = f"{Path(sys.executable).parent}:{kept['PATH']}"

    shell = subprocess.Popen(
        ["bash", "-c", "\n".join(script)],
        cwd=tmp_path,
        env=kept | {"PATH": programs},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = shell.communicate(timeout=100)
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.communicate()

    assert shell.returncode == 0, said
    assert "LINE NUMBER 20000" in said
    assert "exit code 1" in said
    assert "thirteen" in said
    assert "nothing was lost" in said
    assert "killed by SIGKILL" in said
