"""Entering and leaving the CPU runtime: what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron_loco import cpu, patching
from megatron_loco.cpu import megatron, runtime

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the runtime is for machines without CUDA")

PATCHES = (*runtime.PATCHES, *megatron.patches_of(version("megatron-core")))
TARGETS = [patch.target for patch in PATCHES]


def stored(target: str) -> Any:
    """What stands at ``target`` itself, not bound and not inherited; ``None`` for an inherited attribute."""
    module_name, _, path = target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return vars(owner).get(name)


@pytest.mark.parametrize("target", TARGETS)
def test_exit_restores_the_attribute_itself(target: str) -> None:
    before = stored(target)
    with cpu.enter() as entered:
        assert target in entered.targets
        assert stored(target) is not before
    assert stored(target) is before


def test_every_patch_says_why_and_is_a_distinct_object() -> None:
    assert all(patch.why for patch in PATCHES)
    assert len(set(TARGETS)) == len(TARGETS)
    # Dynamo's table of torch functions asserts when one object stands under two names.
    functions = [patch.new for patch in PATCHES if patch.target.startswith("torch")]
    assert len({id(function) for function in functions}) == len(functions)
    assert all(function.__doc__ for function in functions)


def test_exit_leaves_the_function_mode_and_allows_to_enter_again() -> None:
    for _ in range(2):
        with cpu.enter():
            assert torch.zeros(1, device="cuda").device == torch.device("cpu")
        with pytest.raises((AssertionError, RuntimeError)):
            torch.zeros(1, device="cuda")


def test_is_available_stays_false() -> None:
    with cpu.enter():
        assert not torch.cuda.is_available()


@pytest.mark.parametrize("before", [None, "0"])
def test_environment_is_set_and_restored(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if before is None:
        monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    else:
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", before)
    with cpu.enter():
        assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
    assert os.environ.get("TORCHDYNAMO_DISABLE") == before


def test_function_compiled_before_enter_runs_eagerly_inside() -> None:
    graphs = []

    def record(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=record)
    with cpu.enter():
        assert compiled(torch.ones(1)).item() == 2.0
        assert not graphs
    assert compiled(torch.ones(1)).item() == 2.0
    assert graphs


def test_exit_gives_the_generator_back_as_if_the_device_had_drawn_nothing() -> None:
    before = torch.get_rng_state()
    with cpu.enter():
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_second_enter_is_refused_and_exit_is_idempotent() -> None:
    entered = cpu.enter()
    with pytest.raises(RuntimeError, match="active already"):
        cpu.enter()
    entered.exit()
    entered.exit()
    assert entered.targets == ()


def test_refuses_where_cuda_is_available_unless_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    with cpu.enter():  # Megatron must be imported before the lie
        pass
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES"):
        cpu.enter()
    with cpu.enter(force=True):
        assert torch.zeros(1, device="cuda").device.type == "cpu"


def test_exit_refuses_under_a_later_mode_and_restores_nothing() -> None:
    class Later(TorchFunctionMode):
        pass

    entered = cpu.enter()
    with Later():
        with pytest.raises(RuntimeError, match="function mode"):
            entered.exit()
        assert entered.targets == tuple(TARGETS)
    entered.exit()


def test_exit_refuses_under_a_later_patch_and_restores_nothing() -> None:
    later = patching.Patch(
        target="megatron.training.arguments:validate_args", kind="wrap", new=lambda f: lambda *a: f(*a), why="a test"
    )
    entered = cpu.enter()
    with patching.apply([later]):
        with pytest.raises(RuntimeError, match="validate_args"):
            entered.exit()
        assert torch.zeros(1, device="cuda").device.type == "cpu"
    entered.exit()


def test_failed_enter_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = patching.Patch(target="torch.cuda:no_such_function", kind="replace", new=None, why="a test")
    before = stored("torch.cuda:synchronize")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    with monkeypatch.context() as context:
        context.setattr(runtime, "PATCHES", (*runtime.PATCHES, wrong))
        with pytest.raises(patching.SeamError, match="no_such_function"):
            cpu.enter()
    assert stored("torch.cuda:synchronize") is before
    assert "TORCHDYNAMO_DISABLE" not in os.environ
    cpu.enter().exit()


@pytest.mark.parametrize(
    ("release", "modules"),
    [
        ("0.16.1", ["training.initialize", "core.optimizer.distrib_optimizer", "core.pipeline_parallel.schedules"]),
        ("0.17.1", ["training.initialize", "core.optimizer.distrib_optimizer", "core.pipeline_parallel.schedules"]),
        ("0.18.2", ["core.optimizer.distrib_optimizer", "core.models.hybrid.hybrid_block"]),
        ("0.19.0rc1", ["core.models.hybrid.hybrid_block"]),
    ],
)
def test_what_only_some_releases_need(release: str, modules: list[str]) -> None:
    # That the older ones run with it: tests/releases/test_training.py.
    targets = [patch.target.partition(":")[0] for patch in megatron.patches_of(release)]
    assert targets == [f"megatron.{module}" for module in modules]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_import_patches_nothing_and_imports_neither_megatron_nor_triton() -> None:
    code = (
        "import sys, torch\n"
        "before = (torch.cuda.synchronize, torch.Tensor.cuda, torch.get_rng_state)\n"
        "import megatron_loco.cpu\n"
        "assert before == (torch.cuda.synchronize, torch.Tensor.cuda, torch.get_rng_state)\n"
        "assert not {'megatron.core', 'megatron.training', 'triton'} & set(sys.modules)\n"
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_process_that_never_exits_is_quiet() -> None:
    result = run_python("from megatron_loco import cpu\ncpu.enter()\n")
    assert result.returncode == 0, result.stderr
    for noise in ("Transformer Engine", "Apex", "Exception ignored"):
        assert noise not in result.stderr
