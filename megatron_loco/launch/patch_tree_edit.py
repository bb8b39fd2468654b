"""The static patch of one file of Megatron: which lines it adds, and where; the same backwards.

A decorator per function and one import, nothing is removed or changed. Whatever the state of a file, it is therefore
its lines without ours (:func:`without`), and the patched file is what :func:`with_decorators` makes of those.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Sequence

from megatron_loco.patching import DECORATOR

IMPORT = "from megatron_loco.integrations.megatron import loco_seam"
ASSIGNED = "dist_reduce_scatter_func"
ASSIGNMENT = f'{ASSIGNED} = loco_seam({ASSIGNED}, f"{{__name__}}:{ASSIGNED}")'
"""Not a function of Megatron's, but a name for one of torch's: it is assigned anew."""

_OURS = {DECORATOR, IMPORT, ASSIGNMENT}


def without(text: str) -> str:
    """Return ``text`` without the lines of the static patch."""
    return "\n".join(line for line in text.split("\n") if line.strip() not in _OURS)


def with_decorators(text: str, names: Sequence[str]) -> str:
    """Return ``text`` with the lines of the static patch.

    Args:
        text: A module of Megatron, without them.
        names: What to decorate: ``"function"``, ``"Class.method"`` or :data:`ASSIGNED`.

    Raises:
        ValueError: the text is no Python, or a name is not in it, or more than once.
    """
    try:
        module = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"cannot be parsed: {error}") from error
    lines = text.split("\n")
    added: list[tuple[int, str]] = []  # line, counted from 0, before which it goes
    first_use = len(lines)
    for name in names:
        if name == ASSIGNED:
            start = end = _assignment(module).end_lineno or 0
            added.append((end, ASSIGNMENT))
        else:
            start = first_line(find_function(module, name.split(".")[0]))
            position = first_line(find_function(module, name))
            below = lines[position]
            added.append((position, below[: len(below) - len(below.lstrip())] + DECORATOR))
        first_use = min(first_use, start)
    imports = [node.end_lineno or 0 for node in module.body if isinstance(node, ast.Import | ast.ImportFrom)]
    added.append((max((end for end in imports if end <= first_use), default=0), IMPORT))
    ending = "\r" if lines[0].endswith("\r") else ""
    for position, line in sorted(added, reverse=True):
        lines.insert(position, line + ending)
    return "\n".join(lines)


def find_function(module: ast.Module, name: str) -> ast.FunctionDef | ast.ClassDef:
    """Return the definition of ``"function"``, ``"Class.method"`` or ``"Class"``.

    Raises:
        ValueError: there is none, or more than one.
    """
    body: list[ast.stmt] = module.body
    for part in name.split("."):
        found = [n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part]
        node = _only(found, name)
        body = node.body
    return node


def first_line(node: ast.FunctionDef | ast.ClassDef) -> int:
    """The line of a definition or of its first decorator, counted from 0."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1


def _assignment(module: ast.Module) -> ast.stmt:
    # The whole top-level statement, an if or a try, in which the name gets its value.
    def assigns(node: ast.stmt) -> bool:
        return any(
            isinstance(n, ast.Name) and n.id == ASSIGNED and isinstance(n.ctx, ast.Store) for n in ast.walk(node)
        )

    return _only([n for n in module.body if not isinstance(n, ast.FunctionDef | ast.ClassDef) and assigns(n)], ASSIGNED)


def unified_diff(name: str, before: str, after: str) -> Iterator[str]:
    """Return the lines of a diff, as ``difflib.unified_diff`` does; lines that both have are never in it as changed."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    yield f"--- a/{name}\n+++ b/{name}\n"
    # The one thing that difflib's own function cannot be told: blank lines are common, and count all the same.
    for hunk in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(3):
        (_, old_start, _, new_start, _), (_, _, old_end, _, new_end) = hunk[0], hunk[-1]
        yield f"@@ -{old_start + 1},{old_end - old_start} +{new_start + 1},{new_end - new_start} @@\n"
        for _, a, b, c, d in hunk:
            same = old[a:b] == new[c:d]
            yield from ((" " if same else "-") + line for line in old[a:b])
            yield from ("+" + line for line in new[c:d] if not same)


def _only[Node](found: list[Node], name: str) -> Node:
    if len(found) != 1:
        raise ValueError(f"has {name} {len(found)} times, expected once")
    return found[0]
