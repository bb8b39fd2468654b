"""Questions about Python's standard library with the answers that its own docstrings give.

Real pairs with nothing to download: what a function does and which arguments it takes, what a class is, what a module
is for. Read with ``ast`` from the same files as :mod:`~megatron_loco.launch.stdlib_text`; nothing is imported.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from pathlib import Path

from megatron_loco.launch.stdlib_text import SHUFFLE_SEED, parse, source_files

SOURCE = "questions on functions, classes and modules of the Python standard library, and their docstrings"

MIN_ANSWER_CHARS = 12
"""Shorter paragraphs are rather headings than answers."""

MAX_CHARS = 250
"""Of a question and its answer: with role tokens and end they fit in a sample of 256 tokens, unless they hold much that
is not ASCII."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def pairs(folder: Path) -> list[tuple[str, str]]:
    """Read the questions and answers.

    Args:
        folder: The folder of the standard library.

    Returns:
        Pairs in a fixed shuffled order; no question twice.
    """
    found: dict[str, str] = {}
    for path in source_files(folder):
        module = path.relative_to(folder).with_suffix("").parts
        name = ".".join(module[:-1] if module[-1] == "__init__" else module)
        tree = parse(path)
        if tree is None or not _is_public(name):
            continue
        for question, answer in _of_body(tree, name):
            if len(answer) >= MIN_ANSWER_CHARS and len(question) + len(answer) <= MAX_CHARS:
                found.setdefault(question, answer)  # a function that is defined again for another platform
    result = list(found.items())
    random.Random(SHUFFLE_SEED).shuffle(result)
    return result


def _of_body(node: ast.Module | ast.ClassDef, name: str) -> Iterator[tuple[str, str]]:
    asked = f"What is the module {name} for?" if isinstance(node, ast.Module) else f"What is the class {name}?"
    yield asked, _first_paragraph(node)
    for child in node.body:
        if not isinstance(child, ast.ClassDef | _Function) or not _is_public(child.name):
            continue
        full_name = f"{name}.{child.name}"
        if isinstance(child, ast.ClassDef):
            yield from _of_body(child, full_name)
        else:
            yield f"What does {full_name} do?", _first_paragraph(child)
            yield f"Which arguments does {full_name} take?", f"{child.name}({ast.unparse(child.args)})"


def _first_paragraph(node: ast.Module | ast.ClassDef | _Function) -> str:
    return " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())


def _is_public(name: str) -> bool:
    return not any(part.startswith("_") for part in name.split("."))
