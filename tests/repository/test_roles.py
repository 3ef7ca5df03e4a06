"""The command line has no role in it: threads and processes are started below it."""

import ast
from pathlib import Path

CLI = Path(__file__).parents[2] / "cli"
#: What only a role needs.
ROLES = {"asyncio", "multiprocessing", "selectors", "socket", "subprocess", "threading"}


def _imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_no_command_starts_threads_or_processes() -> None:
    modules = sorted(CLI.rglob("*.py"))

    assert len(modules) > 20
    assert {path.name: kinds for path in modules if (kinds := _imported(path) & ROLES)} == {}
