"""Mutants of Python modules, found in their syntax tree and applied to their text.

Nothing is made that no test could mean: log texts, messages of errors, docstrings, annotations,
how something is shown, and the constants at the top of a module, which only set a pace.
"""

import ast
from collections.abc import Iterator

from tests.mutants.mutant import Mutant

_FLIPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
#: Functions that only tell people something.
_TELLING = {"__repr__", "__str__"}
#: Larger numbers set a pace: one more of them is no mistake.
_MOST = 99


def mutants(file: str, source: str) -> list[Mutant]:
    """All that can be made of a module, in the order of the text."""
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    found = [each for each in finder.found if _compiles(each.applied(source))]
    return sorted(found, key=lambda mutant: (mutant.start, mutant.end, mutant.text))


def _compiles(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str, source: str) -> None:
        self.found: list[Mutant] = []
        self._file = file
        # Columns of the tree are bytes, places in the text are characters.
        self._lines = [line.encode() for line in source.splitlines(keepends=True)]
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line.decode()))
        self._functions: list[str] = []

    def _place(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1][:column].decode())

    def _make(self, node: ast.expr | ast.stmt, text: str, mutation: str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._place(node.lineno, node.col_offset)
        end = self._place(node.end_lineno, node.end_col_offset)
        self.found.append(Mutant(self._file, start, end, text, mutation))

    # What is passed over

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in _TELLING:
            return
        self._functions.append(node.name)
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self._functions.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                self.visit(statement)

    def visit_Module(self, node: ast.Module) -> None:
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.visit(statement)

    def visit_Raise(self, node: ast.Raise) -> None:
        """What an error says is not looked at; that it is raised is."""
        self._make(node, "pass", "a statement is left out")

    def visit_Assert(self, node: ast.Assert) -> None:
        """Only tells the type checker."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Text: a message, or the name of something."""

    # What is changed

    def visit_Expr(self, node: ast.Expr) -> None:
        if _is_log(node.value) or isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, ast.Call | ast.Await):
            self._make(node, "pass", "a statement is left out")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        # A name that is missing is no bug that could hide; neither is a field of a new object.
        places = [each for target in node.targets for each in _targets(target)]
        is_state = all(isinstance(each, ast.Attribute | ast.Subscript) for each in places)
        if is_state and self._functions[-1:] != ["__init__"]:
            self._make(node, "pass", "a statement is left out")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._make(node, "pass", "a statement is left out")
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        # Nothing is as false as False, which is turned into True elsewhere.
        value = node.value
        is_nothing = isinstance(value, ast.Constant) and (
            value.value is None or value.value is False
        )
        if node.value and not is_nothing:
            self._make(node, "return None", "nothing is returned")
        if node.value:
            self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            flipped = ast.Compare(node.left, [_FLIPS[type(node.ops[0])]()], node.comparators)
            self._make(node, f"({ast.unparse(flipped)})", "a comparison is flipped")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        text = ast.unparse(ast.BoolOp(other, node.values))
        self._make(node, f"({text})", "and is or, or is and")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._make(node, f"({ast.unparse(node.operand)})", "a not is left out")
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        # A comparison is flipped, and a not is left out: that is the same.
        is_plain = not isinstance(node.test, ast.Compare | ast.UnaryOp | ast.Constant)
        if isinstance(node, ast.If) and all(map(_is_told, node.body)) and not node.orelse:
            return  # whether something is logged
        if is_plain:
            self._make(node.test, f"(not ({ast.unparse(node.test)}))", "a condition is negated")
        self.generic_visit(node)

    visit_While = visit_If  # noqa: N815
    visit_IfExp = visit_If  # noqa: N815

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = {ast.Add: ast.Sub, ast.Sub: ast.Add}.get(type(node.op))
        if other:
            text = ast.unparse(ast.BinOp(node.left, other(), node.right))
            self._make(node, f"({text})", "plus is minus, minus is plus")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._make(node, str(not value), "true is false, false is true")
        elif isinstance(value, int) and value <= _MOST:
            self._make(node, str(value + 1), "a number is one more")


def _targets(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple):
        yield from target.elts
    else:
        yield target


def _is_told(statement: ast.stmt) -> bool:
    """Whether a statement only logs."""
    return isinstance(statement, ast.Expr) and _is_log(statement.value)


def _is_log(value: ast.expr) -> bool:
    """Whether it is a call of the module's logger."""
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)):
        return False
    name = value.func.value
    return isinstance(name, ast.Name) and name.id == "log"
