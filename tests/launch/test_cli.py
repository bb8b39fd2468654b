"""The ``megatron-loco`` command: what it lists is there, exit statuses, and that it starts without heavy modules."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_loco
from megatron_loco.launch import cli

BENCH = Path(megatron_loco.__file__).parent / "bench"


def test_help_and_mistakes_need_neither_torch_nor_megatron() -> None:
    # None in sys.modules makes an import of that name fail, as if it were not installed.
    program = """
import sys
sys.modules.update({"torch": None, "megatron": None, "rich": None, "numpy": None})
from megatron_loco.launch import cli
assert cli.main(["--help"]) == 0
assert cli.main(["bench"]) == 0
assert cli.main(["nothing"]) == 2
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for command in cli.COMMANDS:
        assert f"\n    {command} " in result.stdout
    for name, line in cli.BENCHMARKS.items():
        assert f"{name} " in result.stdout
        assert line in result.stdout


def test_every_benchmark_is_listed() -> None:
    def has_main(path: Path) -> bool:
        return any(
            isinstance(node, ast.FunctionDef) and node.name == "main" for node in ast.parse(path.read_text()).body
        )

    assert {path.stem for path in BENCH.glob("*.py") if has_main(path)} == set(cli.BENCHMARKS)


@pytest.mark.parametrize("command", [name for name in cli.COMMANDS if name != "bench"])
def test_every_command_has_help_with_an_exit_status(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(importlib.import_module(cli.COMMANDS[command][0]).main)
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "usage: " in text
    assert f"\n  megatron-loco {command} " in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "commands"),
        (["trian"], "invalid choice"),
        (["bench", "wires"], "did you mean wire?"),
        (["bench", "wire", "--nothing"], "unrecognized arguments"),
        (["train", "missing.yaml"], "no such file"),
        (["report", "missing"], "missing"),
        (["plan", "--gpu", "a100"], "--network-gbit"),
        (["doctor", "--nproc", "0"], "--nproc must be at least 1"),
        (["patch", "aply", "."], "invalid choice"),
        (["patch", "status", "missing"], "no Megatron there"),
    ],
)
def test_wrong_usage_ends_with_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"megatron-loco {megatron_loco.__version__}\n"
