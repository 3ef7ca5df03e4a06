"""The mutation tests' own instruments: what is changed, what is not, and that it is noticed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants import lua_code, python_code
from tests.mutants.mutant import Mutant
from tests.mutants.program import (
    ROOT,
    Excuse,
    Lab,
    Pace,
    Tree,
    Verdict,
    excuses,
    is_excused,
    judge,
    made,
    score,
    table,
)
from tests.mutants.targets import TARGETS, Target

MODULE = '''"""Says 1 + 1 == 2 to nobody."""

LARGE = 7


def grown(size: int = 3, most: "int < 5" = 9) -> int:
    """Return 1 more, if size < most."""
    if not size:
        raise ValueError(f"{size + 1} == 2")
    return size + 1
'''
TESTS = """from toy import grown


def test_grown():
    assert grown(2) == 3
"""
SCRIPT = """-- toy: if a == b then it is no code
local n = tonumber(ARGV[1])
if n <= 5 and KEYS[2] then
  redis.call("HSET", KEYS[1], "a == b",
    n + 1)
end
return redis.call("GET", KEYS[1])
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    root = tmp_path / "toy"
    root.mkdir()
    (root / "toy.py").write_text(MODULE)
    (root / "tests").mkdir()
    (root / "tests" / "test_toy.py").write_text(TESTS)
    return root


def changes(source: str, found: list[Mutant]) -> set[tuple[str, str]]:
    return {(source[each.start : each.end], each.text) for each in found}


def test_of_a_module_only_code_that_does_something_is_changed() -> None:
    assert changes(MODULE, python_code.mutants("toy.py", MODULE)) == {
        ("3", "4"),
        ("9", "10"),
        ("not size", "(size)"),
        ('raise ValueError(f"{size + 1} == 2")', "pass"),
        ("return size + 1", "return None"),
        ("size + 1", "(size - 1)"),
        ("1", "2"),
    }


def test_of_a_module_what_only_logs_is_not_changed() -> None:
    source = "def told(n):\n    if n > 3:\n        log.info('more than %d', 3)\n    log.info(n)\n"
    assert python_code.mutants("toy.py", source) == []


def test_nothing_is_not_returned_for_what_is_false_already() -> None:
    source = "def told(n):\n    if n:\n        return False\n    return True\n"
    found = changes(source, python_code.mutants("toy.py", source))
    assert found == {
        ("n", "(not (n))"),
        ("False", "True"),
        ("True", "False"),
        ("return True", "return None"),
    }


def test_of_a_script_comments_texts_and_the_signature_are_not_changed() -> None:
    found = changes(SCRIPT, lua_code.mutants("toy.lua", SCRIPT))

    assert found == {
        ("<=", "<"),
        ("and", "or"),
        ("n <= 5 and KEYS[2]", "not (n <= 5 and KEYS[2])"),
        ('redis.call("HSET", KEYS[1], "a == b",\n    n + 1)', "do end"),
        ("+", "-"),
        ("1", "2"),
    }


def test_choice_is_the_same_each_time_and_one_of_the_whole(toy: Path) -> None:
    target = Target("toy", ("toy.py",), ("tests/test_toy.py",))
    some = made(target, toy, 3, seed=1)

    assert len(some) == 3
    assert some == made(target, toy, 3, seed=1)
    assert set(some) < set(made(target, toy, 99, seed=1))
    assert set(some) != set(made(target, toy, 3, seed=2))


@pytest.fixture
def tree(toy: Path, tmp_path: Path) -> Iterator[Tree]:
    tree = Tree(toy, tmp_path / "tree")
    yield tree
    tree.close()


def test_mutant_is_applied_noticed_and_taken_back(toy: Path, tree: Tree) -> None:
    target = Target("toy", ("toy.py",), ("tests/test_toy.py tests/test_missing.py",))
    every = {each.text: each for each in made(target, toy, 99, seed=1)}
    selections = list(target.selections(toy, "toy.py"))

    verdicts = [
        judge(tree, every[text], selections, lambda _: Pace()) for text in ("(size - 1)", "pass")
    ]

    assert [verdict.word for verdict in verdicts] == ["killed", "survived"]
    assert verdicts[0].by == "tests/test_toy.py::test_grown"
    verdicts.append(Verdict(every["4"], "excused"))
    assert score(verdicts) == 50.0
    assert table({"toy": verdicts}).endswith("| toy | 3 | 1 | 1 | 50 % |")
    assert (tree.root / "toy.py").read_text() == MODULE
    assert "-    return size + 1\n+    return (size - 1)" in every["(size - 1)"].diff(MODULE)


@pytest.mark.parametrize("mishap", ["assert 0", "time.sleep(60)"])
def test_test_that_fails_only_once_has_noticed_nothing(toy: Path, tree: Tree, mishap: str) -> None:
    mutant = made(Target("toy", ("toy.py",), ()), toy, 1, seed=1)[0]
    (tree.root / "tests" / "test_toy.py").write_text(
        "import time\nfrom pathlib import Path\n\n\ndef test_shaky():\n"
        "    with Path('looks').open('a+') as looks:\n"
        "        looks.write('.')\n"
        f"    if Path('looks').read_text() == '.':\n        {mishap}\n"
    )

    verdict = judge(tree, mutant, [["tests/test_toy.py"]], lambda _: Pace(5))

    assert verdict.word == "survived"
    assert (tree.root / "looks").read_text() >= "..."


def test_test_that_fails_without_the_mutant_has_noticed_nothing(toy: Path, tree: Tree) -> None:
    mutant = made(Target("toy", ("toy.py",), ()), toy, 1, seed=1)[0]
    (tree.root / "tests" / "test_toy.py").write_text("def test_it():\n    assert 0\n")

    verdict = judge(tree, mutant, [["tests/test_toy.py"]], lambda _: Pace())

    assert verdict.word == "survived"


def test_test_that_hangs_is_ended_long_before_all_would_be(tree: Tree) -> None:
    (tree.root / "tests" / "test_toy.py").write_text(
        "import time\n\n\ndef test_it():\n    time.sleep(90)\n"
    )

    seen = tree.look(["tests/test_toy.py"], Pace(80, {"tests/test_toy.py::test_it": 0.01}, 1.0))

    assert (seen.is_well, seen.failed) == (False, "tests/test_toy.py::test_it")


def test_tests_that_noticed_the_last_mutant_look_first_at_the_next(
    toy: Path, tmp_path: Path
) -> None:
    looks = tmp_path / "looks"
    (toy / "tests" / "test_toy.py").write_text(
        f"def test_it():\n    with open({str(looks)!r}, 'a') as looks:\n        looks.write('.')\n"
    )
    (toy / "tests" / "test_zoo.py").write_text(TESTS)
    target = Target("toy", ("toy.py",), ("tests/test_toy.py", "tests/test_zoo.py"))
    every = {each.text: each for each in made(target, toy, 99, seed=1)}
    lab = Lab(toy, tmp_path / "lab", 1)

    try:
        verdicts = list(lab.judge(target, [every["(size - 1)"], every["return None"]]))
    finally:
        lab.close()

    assert [verdict.by for verdict in verdicts] == ["tests/test_zoo.py::test_grown"] * 2
    assert looks.read_text() == "..", "once without a mutant, once with the first"


def test_quickest_tests_look_first(tree: Tree) -> None:
    three = "".join(f"def test_{name}():\n    assert 0\n\n\n" for name in "abc")
    (tree.root / "tests" / "test_toy.py").write_text(three)
    seconds = {
        f"tests/test_toy.py::test_{name}": at
        for name, at in zip("abc", (3.0, 1.0, 2.0), strict=True)
    }

    seen = tree.look(["tests/test_toy.py"], Pace(60, seconds))

    assert seen.failed == "tests/test_toy.py::test_b"
    assert list(seen.seconds) == [seen.failed], "the others are not run"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import time\n\ntime.sleep(60)\n", "it took too long"),
        ("import os\n\nos._exit(0)\n", "pytest itself ended"),
    ],
)
def test_tests_that_hang_or_end_themselves_have_noticed(tree: Tree, text: str, why: str) -> None:
    (tree.root / "tests" / "test_toy.py").write_text(text)

    seen = tree.look(["tests/test_toy.py"], Pace(5))

    assert (seen.is_well, seen.failed) == (False, why)
    (tree.root / "tests" / "test_toy.py").write_text(TESTS)
    assert tree.look(["tests/test_toy.py"]).is_well


def test_selection_of_nothing_is_a_mistake(tree: Tree) -> None:
    (tree.root / "tests" / "test_toy.py").write_text("")
    with pytest.raises(RuntimeError, match="no test is selected"):
        tree.look(["tests/test_toy.py"])


def test_excuse_is_for_one_line_and_one_change(toy: Path) -> None:
    every = made(Target("toy", ("toy.py",), ()), toy, 99, seed=1)
    known = [Excuse("toy.py", "if not size:", "a not is left out", "why not")]

    excused = [each.text for each in every if is_excused(each, MODULE, known)]

    assert excused == ["(size)"]


def test_excuse_may_be_for_one_of_several_of_a_line(toy: Path) -> None:
    every = made(Target("toy", ("toy.py",), ()), toy, 99, seed=1)
    line = 'def grown(size: int = 3, most: "int < 5" = 9) -> int:'
    becomes = line.replace("3", "4")
    known = [Excuse("toy.py", line, "a number is one more", "why not", becomes)]

    excused = [each.text for each in every if is_excused(each, MODULE, known)]

    assert excused == ["4"]


def test_excuse_may_be_for_one_of_several_lines_that_read_the_same() -> None:
    source = "def shown(n):\n    return n + 1\n\n\ndef hidden(n):\n    return n + 1\n"
    every = python_code.mutants("toy.py", source)
    known = [Excuse("toy.py", "return n + 1", "nothing is returned", "why not", nth=2)]

    excused = [each.line_number(source) for each in every if is_excused(each, source, known)]

    assert excused == [6]


def test_every_excuse_has_its_line_and_a_reason() -> None:
    for excuse in excuses():
        lines = {line.strip() for line in (ROOT / excuse.file).read_text().splitlines()}
        assert excuse.line in lines, excuse
        assert excuse.reason, excuse


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_every_target_has_files_and_tests(target: Target) -> None:
    files = target.files(ROOT)
    assert files
    assert all(list(target.selections(ROOT, str(file))) for file in files)
