"""The package's rooms: who may import whom, and what importing it may not need."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_loco

PACKAGE = Path(megatron_loco.__file__).parent

LEVELS = {
    "config": 0,
    "patching": 0,
    "core": 0,
    "kernels": 1,
    "collectives": 2,
    "integrations": 3,
    "cpu": 3,
    "ddp": 4,
    "fsdp2": 4,
    "launch": 4,
    "bench": 4,
}
"""A room may import rooms of a lower level, and itself."""

ALLOWED_PEERS = {("core", "config"), ("bench", "launch")}


def _room(module: str) -> str:
    return module.split(".")[1]


def _imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {module for module in modules if module.startswith("megatron_loco.")}


def test_every_room_has_a_level() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms - {"__init__"} == set(LEVELS) & rooms


def test_imports_go_one_way() -> None:
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        for module in _imports(path):
            other = _room(module)
            lower = other == room or LEVELS.get(other, -1) < LEVELS[room]
            if not lower and (room, other) not in ALLOWED_PEERS:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {module}")
    assert not wrong


@pytest.mark.kind(26)
@pytest.mark.parametrize(
    "module",
    [
        "megatron_loco",
        "megatron_loco.collectives.reduce_scatter",
        "megatron_loco.cpu",
        "megatron_loco.ddp",
        "megatron_loco.fsdp2",
    ],
)
def test_imports_without_triton_and_megatron_and_patches_nothing(module: str) -> None:
    # None in sys.modules makes an import of that name fail, as if it were not installed.
    program = f"""
import sys
sys.modules.update({{"triton": None, "megatron": None, "transformer_engine": None, "apex": None}})
import torch
import torch.distributed.checkpoint, torch.distributed.fsdp  # these set names in each other when imported
before = {{name: dict(vars(m)) for name, m in list(sys.modules.items()) if m and name.startswith("torch.distributed")}}
before["cuda"] = dict(vars(torch.cuda))
import {module}
after = {{name: dict(vars(sys.modules[name])) for name in before if name != "cuda"}}
after["cuda"] = dict(vars(torch.cuda))
changed = [(n, k) for n in before for k in before[n] if after[n].get(k) is not before[n][k]]
assert not changed, changed
assert not any(name == "megatron" or name.startswith("megatron.") for name, m in sys.modules.items() if m)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_config_needs_no_torch() -> None:
    program = 'import sys; sys.modules["torch"] = None; import megatron_loco; megatron_loco.LoCoConfig(bits=4)'
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_public_names() -> None:
    assert len(megatron_loco.__all__) <= 10
    assert all(hasattr(megatron_loco, name) for name in megatron_loco.__all__)
