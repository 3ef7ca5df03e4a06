"""The digests of all scripts: a change of the layout or of comments must not change one.

A server knows a script by its digest, and so do its ACL and workers of another version. So a
digest changes only when a script is changed on purpose.
"""

from pathlib import Path

from streamq.protocol.lua import script_digest
from tests.scripts.script import SCRIPTS

TABLE = Path(__file__).with_name("digests.txt")
#: Writes the table anew.
COMMAND = ".venv/bin/python -m tests.repository.test_digests"


def lines() -> list[str]:
    """A line for each script: its name and its digest."""
    return sorted(f"{script.name} {script_digest(script.name)}" for script in SCRIPTS)


def test_no_script_has_changed_by_accident() -> None:
    kept = set(TABLE.read_text().splitlines())
    changed = sorted({line.split()[0] for line in kept ^ set(lines())})

    assert not changed, (
        f"what the server gets has changed of: {', '.join(changed)}. If that is on purpose, "
        f"write the table anew: {COMMAND}"
    )


if __name__ == "__main__":
    TABLE.write_text("\n".join(lines()) + "\n")
