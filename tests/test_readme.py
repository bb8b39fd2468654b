"""The tables of the README say what the code does: every row is proved by a test that exists, every refusal is real."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from megatron_loco.config import fields, flag
from megatron_loco.integrations.megatron.arguments import _UNSUPPORTED

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def rows(header: str) -> list[list[str]]:
    """Cells of the rows of the table with this header line."""
    after = README.partition(header + "\n")[2]
    assert after, f"no table {header}"
    table = after.splitlines()[1:]
    end = next((number for number, line in enumerate(table) if not line.startswith("|")), len(table))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[:end]]


def test_support_table_names_tests_that_exist() -> None:
    table = rows("| what | state | proved by |")
    assert len(table) > 20
    for _, state, proof in table:
        assert state
        path, _, name = proof.strip("`").partition("::")
        tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, proof


def test_refusals_are_those_of_the_argument_check() -> None:
    named = {name for cell, _ in rows("| flag | when |") for name in re.findall(r"--[a-z0-9-]+", cell)}
    assert named == {name for name, _, _ in _UNSUPPORTED}


def test_every_setting_is_in_the_table_with_its_default() -> None:
    table: dict[str, str] = {}
    for names, defaults, _ in rows("| flag | default | meaning |"):
        flags = re.findall(r"--loco-[a-z0-9-]+", names)
        table |= dict(zip(flags, defaults.split(", "), strict=True)) if len(flags) > 1 else {flags[0]: defaults}
    expected = {flag(name): str(default) if default is not None else "off" for name, _, default, _ in fields()}
    assert {name: value.removesuffix(".0") for name, value in expected.items()} == table
