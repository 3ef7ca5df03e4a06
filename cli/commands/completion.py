"""``streamq completion``."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from streamq.errors import InvalidValue

from .. import render

_BASH = """# Completion of streamq for bash.
_streamq() {
    local IFS=$'\\n'
    COMPREPLY=($(streamq _complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -o nosort -F _streamq streamq
"""
_ZSH = """#compdef streamq
# Completion of streamq for zsh.
_streamq() {
    local -a found
    found=("${(@f)$(streamq _complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "${found[1]}" ]]; then compadd -V streamq -- "${found[@]}"; else _files; fi
}
if [[ "${funcstack[1]}" == _streamq ]]; then _streamq "$@"; else compdef _streamq streamq; fi
"""
_FISH = """# Completion of streamq for fish.
function __streamq_complete
    set -l words (commandline -opc)[2..-1] (commandline -ct)
    streamq _complete $words 2>/dev/null
end
complete -c streamq -a '(__streamq_complete)'
"""


class Shell(StrEnum):
    """A shell that words can be completed in."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


_SCRIPTS = {Shell.BASH: _BASH, Shell.ZSH: _ZSH, Shell.FISH: _FISH}


def completion(
    shell: Annotated[
        Shell | None,
        typer.Argument(metavar="SHELL", help="Bash, zsh or fish; without it, that of $SHELL."),
    ] = None,
    is_installed: Annotated[
        bool,
        typer.Option("--install", help="Write the script where new shells of this user read it."),
    ] = False,
) -> None:
    """Print the script with which a shell completes commands, options and ids of streamq.

    Ids are those of the runs in the current folder, and of the requests of the server that the
    settings name. The server gets a tenth of a second to answer.

        streamq completion bash --install
    """
    wanted = shell or _shell_to_complete_for()
    script = _SCRIPTS[wanted]
    if not is_installed:
        render.data(script.rstrip("\n"))
        return
    place = _completion_file(wanted)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(script, encoding="utf-8")
    render.note(f"wrote {place}; new shells complete streamq{_completion_advice(wanted, place)}")


def _shell_to_complete_for() -> Shell:
    name = Path(os.environ.get("SHELL", "")).name
    try:
        return Shell(name)
    except ValueError:
        raise InvalidValue(
            f"which shell? $SHELL is {name or 'not set'}: give bash, zsh or fish"
        ) from None


def _completion_file(shell: Shell) -> Path:
    """Return the file in which the shell looks for completions of a user."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return {
        Shell.BASH: data / "bash-completion/completions/streamq",
        Shell.ZSH: data / "zsh/site-functions/_streamq",
        Shell.FISH: config / "fish/completions/streamq.fish",
    }[shell]


def _completion_advice(shell: Shell, place: Path) -> str:
    if shell is Shell.ZSH:
        return f", if .zshrc has: fpath+=({place.parent}); autoload -U compinit; compinit"
    return " (with the package bash-completion)" if shell is Shell.BASH else ""
