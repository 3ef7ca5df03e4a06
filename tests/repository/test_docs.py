"""The documents: links lead somewhere, commands exist, the reference is fresh, tutorials run."""

import ast
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import streamq
from cli.app import COMMANDS, application
from docs import python_page

ROOT = Path(__file__).parents[2]
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


def _options(command: Any) -> set[str]:
    return {word for each in command.params for word in (*each.opts, *each.secondary_opts)}


def _misnamed(code: str, commands: dict[str, Any]) -> list[str]:
    """Commands of ours in some code that are none, and options that they do not have."""
    found = []
    for name, rest in re.findall(r"(?<![-\w/.=])(?<!-n )streamq +([a-z]+)(.*)", code):
        # Where several stand in a line there is much room between them.
        words = re.split(r"  +streamq |[|#;]", rest)[0].split()
        command = commands.get(name)
        seconds = getattr(command, "commands", {})
        command = next((seconds[word] for word in words if word in seconds), command)
        known = _options(command) if command else set()
        given = {re.split("[]=]", word.lstrip("["))[0] for word in words if "--" in word[:3]}
        if command is None or given - known - {"--help"}:
            found.append(f"streamq {name}{rest}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_are_named_right(page: Path) -> None:
    main: Any = typer.main.get_command(application(COMMANDS))
    text = page.read_text()
    code = [body for language, body in _BLOCK.findall(text) if language != "python"]
    spans = re.findall(r"`([^`]+)`", _BLOCK.sub("", text))

    wrong = [each for some in [*code, *spans] for each in _misnamed(some, main.commands)]

    assert wrong == []


def test_every_document_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()

    assert [page.name for page in ROOT.glob("docs/*.md") if f"({page.name})" not in index] == [
        "README.md"
    ]


def test_generated_files_are_of_this_code() -> None:
    code = """
import json
from docs.generate import generated
print(json.dumps({str(path): text for path, text in generated().items()}))
"""
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    made = {Path(name): text for name, text in json.loads(said).items()}

    stale = [
        path.name for path, text in made.items() if not path.exists() or path.read_text() != text
    ]
    assert not stale, "stale: make docs"
    assert {*ROOT.glob("docs/man/*")} == {path for path in made if path.parent.name == "man"}


@pytest.mark.skipif(not shutil.which("groff"), reason="there is no groff here")
def test_man_pages_are_understood() -> None:
    pages = sorted(ROOT.glob("docs/man/*.1"))

    said = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", *pages], capture_output=True, text=True, check=True
    )

    assert said.stderr == ""
    # Bold letters are printed twice, one over the other.
    assert "--retry-failed [ID]" in re.sub(f".{chr(8)}", "", said.stdout)


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    assert python_page.names() == sorted(streamq.__all__)


@pytest.mark.parametrize("name", [name for some in python_page.SECTIONS.values() for name in some])
def test_public_class_has_an_example_that_is_python(name: str) -> None:
    examples = [
        textwrap.dedent(said.partition("\nExample:\n")[2])
        for said in _docstrings(getattr(streamq, name))
    ]

    assert examples[0], "the class has none"
    for example in examples:
        compile(example, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def _docstrings(kind: type) -> Iterator[str]:
    for value in (kind, *vars(kind).values()):
        yield inspect.cleandoc(getattr(value, "__doc__", None) or "")


def test_contributing_says_of_each_module_what_belongs_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    modules = [
        path
        for folder in ("streamq", "cli")
        for path in (ROOT / folder).rglob("*.py")
        if not path.name.startswith("__") and path.name != "streamq_pb2.py"
    ]

    assert len(modules) > 200
    placed = [path for path in modules if path.parent.name != "commands"]
    of_name = Counter(path.name for path in placed)
    for path in placed:
        if of_name[path.name] > 1:
            assert f"{path.parent.name}/{path.name}`" in text, path
        else:
            assert f"/{path.name}`" in text or f"`{path.name}`" in text, path


#: Words that begin no sentence which says what a function does.
_NO_VERBS = frozenset(
    {"A", "About", "All", "An", "How", "If", "In", "It", "Its", "No", "Of", "One", "So", "The"}
    | {"This", "Those", "What", "When", "Where", "Whether", "Which", "Who", "Whoever"}
)


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    seen = 0
    for folder in ("streamq", "cli"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                text = ast.get_docstring(node) or ""
                decorators = {each.id for each in node.decorator_list if isinstance(each, ast.Name)}
                # A property is read as a noun. What __init__ says is about its parameters.
                if (
                    not text
                    or node.name.startswith("__")
                    or decorators & {"property", "cached_property"}
                ):
                    continue
                seen += 1
                assert re.split(r"\W", text)[0] not in _NO_VERBS, f"{path}:{node.lineno} {text}"
    assert seen > 1_000


def test_files_that_contributing_names_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:\w+/)+\w+\.(?:py|lua))`", text)

    assert len(named) > 100
    for name in named:
        assert (ROOT / name).is_file() or (ROOT / "streamq" / name).is_file(), name


def test_files_and_functions_that_the_architecture_names_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`((?:streamq|cli|lua)/[\w/]+\.(?:py|lua))`(?:: `([\w.]+)`)?", text)

    assert len(named) > 20
    for path, function in named:
        file = ROOT / path
        assert file.is_file(), path
        for word in function.split(".") if function else ():
            assert re.search(rf"\b(def|class) {word}\b", file.read_text()), (path, word)


def _run(script: list[str], folder: Path) -> str:
    """What a script says that a shell runs to its end, as a user has it who just installed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STREAMQ_")}
    programs = f"{Path(sys.executable).parent}:{kept['PATH']}"
    shell = subprocess.Popen(
        ["bash", "-c", "\n".join(["set -eu -o pipefail", "trap 'kill $(jobs -p)' EXIT", *script])],
        cwd=folder,
        env=kept | {"PATH": programs},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = shell.communicate(timeout=300)
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.communicate()
    assert shell.returncode == 0, said
    return said


def _blocks(page: Path, folder: Path) -> list[tuple[str, str]]:
    """Blocks of a page, after those that are files have been written."""
    blocks = _BLOCK.findall(page.read_text())
    for language, body in blocks:
        named = re.match(r"# (\w+\.py)\n", body)
        if language == "python" and named:
            (folder / named[1]).write_text(body)
    return blocks


@pytest.mark.timeout(320)
@pytest.mark.long
def test_commands_of_the_tutorial_run(tmp_path: Path) -> None:
    blocks = _blocks(ROOT / "docs" / "tutorial.md", tmp_path)

    said = _run([body for language, body in blocks if language == "sh"], tmp_path)

    assert "LINE NUMBER 20000" in said
    assert "exit code 1" in said
    assert "thirteen" in said
    assert "nothing was lost" in said
    assert "1 x B-62" in said
    assert "Abandon: nothing was ordered" in said
    assert "killed by SIGKILL" in said


#: What stands in the README for something that only the reader knows, or stays in the foreground.
_MEANT = (
    (r"^(streamq server)\b.*", r"\1 >url & until test -s url; do sleep 0.1; done"),
    (r"STREAMQ_URL=\.\.\..*", r"STREAMQ_URL=$(cat url)"),
    (r"^(streamq worker [^#]*).*", r"\1 &"),
    (r"^(streamq load [^#]*).*", r"ID=$(\1)"),
    (r"\bID\b", r"$ID"),
    (r"^\$ID=", r"ID="),
    (r"/shared/", r"$PWD/"),
    (r"\bFOLDER\b", r"users"),
    (r"[][]", r""),
)


def _commands(body: str) -> list[str]:
    """The commands of a block, as a reader would type them; ``a|b`` is one, then the other."""
    commands = []
    for line in body.splitlines():
        # Where several stand in a line there is much room between them.
        for command in re.split(r"  +(?=streamq )", line):
            for pattern, meant in _MEANT:
                command = re.sub(pattern, meant, command)
            choice = re.search(r"\w+(\|\w+)+", command)
            words = choice[0].split("|") if choice else [""]
            commands += [command.replace(choice[0], word) if choice else command for word in words]
    return commands


@pytest.mark.timeout(320)  # thirty commands, one after another
def test_commands_of_the_readme_run(tmp_path: Path) -> None:
    (tmp_path / "big.csv").write_text("item,count\n Pear ,3\nPLUM,4\n")
    (tmp_path / "words.txt").write_text("pear\nplum\napple\n")
    (tmp_path / "big.txt").write_text("pear\nplum\n")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_bytes(b"\xff\xd8")
    shutil.copy(ROOT / "samples" / "checksums.py", tmp_path)
    script: list[str] = []
    for language, body in _blocks(ROOT / "README.md", tmp_path):
        if language == "python" and body.startswith("from streamq import Client"):
            (tmp_path / "submit.py").write_text(body.replace("...", "print(part, result)"))
            script.append("python submit.py")
        elif not language and body.startswith(("streamq status", "streamq set")):
            # Of a request that has ended some are refused; none is misunderstood.
            script += [f"{{ {line}; }} || test $? = 1" for line in _commands(body)]
        elif not language and body.startswith(("streamq", "cat")):
            script += [f"{line}\nrm -f out.jsonl" for line in _commands(body)]

    said = _run(script, tmp_path)

    assert "streamq run big.csv --map shop:clean -o out.jsonl\nrm -f out.jsonl" in script
    assert "APPLE\nPEAR\nPLUM\n" in said
    assert (tmp_path / "out.txt").read_text() == "PEAR\nPLUM\n"
    assert '"file":"photos/one.jpg"' in (tmp_path / "sums.jsonl").read_text()
    assert "1000 LINE 999" in said
    assert {"streamq ls", "streamq cancel $ID", "streamq doctor --fix"} <= {
        line.partition("; }")[0].removeprefix("{ ") for line in script
    }
