"""One small change of a file that a test is to notice."""

import difflib
from typing import NamedTuple


class Mutant(NamedTuple):
    """A piece of a file and what stands there instead."""

    #: From the top of the checkout.
    file: str
    #: Where the piece begins and ends, in characters of the text.
    start: int
    end: int
    text: str
    #: What kind of change it is, in a few words.
    mutation: str

    def applied(self, source: str) -> str:
        """The file with the change."""
        return source[: self.start] + self.text + source[self.end :]

    def line_number(self, source: str) -> int:
        """The line where the change begins, from 1."""
        return source.count("\n", 0, self.start) + 1

    def line(self, source: str) -> str:
        """That line as it was, without its indent."""
        return source.splitlines()[self.line_number(source) - 1].strip()

    def diff(self, source: str) -> str:
        """The change as a diff without context."""
        lines = difflib.unified_diff(
            source.splitlines(), self.applied(source).splitlines(), lineterm="", n=0
        )
        return "\n".join(line for line in lines if not line.startswith(("---", "+++")))
