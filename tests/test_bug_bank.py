"""Every kind of bug in ``tests/bug_bank.py`` has a test that carries its number."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bug_bank import KINDS

TESTS = Path(__file__).parent


def _marks(node: ast.AST) -> Iterator[ast.Call]:
    """Calls of ``pytest.mark.kind`` in a piece of code."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.kind":
            yield call


def marked_tests(source: str) -> dict[int, list[str]]:
    """Names of the test functions of a file by the kinds that they carry.

    Raises:
        AssertionError: a mark stands where pytest would ignore it, or its numbers are no literals.
    """
    tree = ast.parse(source)
    found: dict[int, list[str]] = defaultdict(list)
    understood = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            for decorator in node.decorator_list:
                for mark in _marks(decorator):
                    understood.add(mark)
                    numbers = [ast.literal_eval(argument) for argument in mark.args]
                    assert numbers, f"line {mark.lineno}: a kind has a number"
                    assert not mark.keywords, f"line {mark.lineno}: the numbers of kinds are positional"
                    for number in numbers:
                        found[number].append(node.name)
    stray = [mark.lineno for mark in _marks(tree) if mark not in understood]
    assert not stray, f"lines {stray}: a kind is the decorator of a test function, or in one (pytest.param)"
    return found


def test_every_kind_has_a_test() -> None:
    covered: dict[int, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        if path == Path(__file__):
            continue
        for number, names in marked_tests(path.read_text(encoding="utf-8")).items():
            covered[number] += [f"{path.relative_to(TESTS)}::{name}" for name in names]
    unknown = {number: covered[number] for number in covered if number not in KINDS}
    assert not unknown, "marked with a kind that tests/bug_bank.py does not have"
    missing = [f"{kind.number}: {kind.name}" for kind in KINDS.values() if kind.number not in covered]
    assert not missing


def test_entries_are_complete() -> None:
    names = [kind.name for kind in KINDS.values()]
    reports = [kind.report for kind in KINDS.values()]
    assert len(set(names)) == len(set(reports)) == len(KINDS)
    for number, kind in KINDS.items():
        assert kind.number == number
        owner, repository, thread, digits = kind.report.removeprefix("https://github.com/").split("/")
        assert owner
        assert repository
        assert thread in ("issues", "pull")
        assert digits.isdecimal()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def test_a(): pass", {}),
        ("@pytest.mark.kind(3)\ndef test_a(): pass", {3: ["test_a"]}),
        (
            "@pytest.mark.kind(3, 9)\n@pytest.mark.kind(1)\ndef test_a(): pass",
            {3: ["test_a"], 9: ["test_a"], 1: ["test_a"]},
        ),
        (
            "@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.kind(3)), 2])\ndef test_a(x): pass",
            {3: ["test_a"]},
        ),
        ("@pytest.mark.kind()\ndef test_a(): pass", None),
        ("@pytest.mark.kind(number=3)\ndef test_a(): pass", None),
        ("@pytest.mark.kind(3)\ndef helper(): pass", None),  # pytest never collects it
        ("@pytest.mark.kind(3)\nclass Helper: pass", None),
        ("pytestmark = pytest.mark.kind(3)", None),  # says nothing of what covers the kind
    ],
)
def test_marks_are_found_where_they_count(source: str, found: dict[int, list[str]] | None) -> None:
    if found is None:
        with pytest.raises(AssertionError):
            marked_tests(source)
    else:
        assert marked_tests(source) == found
