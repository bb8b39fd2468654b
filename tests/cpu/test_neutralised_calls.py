"""Each neutralised call works inside the runtime and is needed: without its patch the same call fails."""

from __future__ import annotations

import importlib
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.utils.data import DataLoader, TensorDataset

from megatron_loco import cpu
from megatron_loco.cpu import placement, runtime

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the runtime is for machines without CUDA")


NUMBERS = TensorDataset(torch.arange(2))


def moves_to_the_device() -> None:
    tensor = torch.ones(1)
    assert tensor.cuda() is tensor
    assert torch.nn.Linear(1, 1).cuda().weight.device.type == "cpu"


def has_a_cuda_type_name() -> None:
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1).type(torch.float64).dtype == torch.float64


def counts_devices() -> None:
    assert torch.cuda.device_count() > 0


def allocates_on_the_current_device() -> None:
    assert torch.zeros(1, device=torch.cuda.current_device()).device.type == "cpu"


def sets_the_device() -> None:
    torch.cuda.set_device(0)


def reads_the_capability() -> None:
    assert torch.cuda.get_device_capability() >= (8, 0)


def makes_a_stream() -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(stream)
    stream.record_event().synchronize()
    stream.synchronize()
    with torch.cuda.stream(stream):
        pass


def asks_for_the_current_stream() -> None:
    torch.cuda.current_stream().synchronize()


def synchronizes() -> None:
    torch.cuda.synchronize()


def device_draws_leave_the_host_alone() -> None:
    before = torch.get_rng_state()
    torch.nn.functional.dropout(torch.ones(3))
    assert torch.equal(torch.get_rng_state(), before)


def restoring_the_host_leaves_the_device_alone() -> None:
    host = torch.get_rng_state()
    torch.cuda.manual_seed(3)
    device = torch.cuda.get_rng_state()
    torch.set_rng_state(host)
    assert torch.equal(torch.cuda.get_rng_state(), device)


def seeds_the_host() -> None:
    torch.manual_seed(3)
    seeded = torch.get_rng_state()
    iter(DataLoader(NUMBERS))
    torch.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), seeded)


def loaders_draw_on_the_host() -> None:
    host, device = torch.get_rng_state(), torch.cuda.get_rng_state()
    iter(DataLoader(NUMBERS))
    assert torch.equal(torch.cuda.get_rng_state(), device)
    assert not torch.equal(torch.get_rng_state(), host)


def reads_the_device_state() -> None:
    assert torch.cuda.get_rng_state().dtype == torch.uint8


def tracker_reads_the_device_state() -> None:
    megatron_random = importlib.import_module("megatron.core.tensor_parallel.random")
    assert megatron_random._get_cuda_rng_state().dtype == torch.uint8


def restores_the_device_state() -> None:
    before = torch.cuda.get_rng_state()
    torch.rand(1)
    torch.cuda.set_rng_state(before)
    assert torch.equal(torch.cuda.get_rng_state(), before)


def fork_restores_the_device_state() -> None:
    tracker = importlib.import_module("megatron.core.tensor_parallel.random").CudaRNGStatesTracker()
    tracker.add("mine", 5)
    before = torch.cuda.get_rng_state()
    with tracker.fork("mine"):
        drawn = torch.rand(2)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(5)))


def seeds_the_device() -> None:
    torch.cuda.manual_seed(3)
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(3)))


def splits_by_tensors() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        received = torch.zeros(3)
        sizes: Any = torch.tensor([3])
        dist.all_to_all_single(received, torch.ones(3), sizes, sizes)
        assert received.tolist() == [1.0, 1.0, 1.0]
    finally:
        dist.destroy_process_group()


def validation_names_the_flags() -> None:
    arguments = importlib.import_module("megatron.training.arguments")
    with pytest.raises(ValueError, match="cannot work on CPU"):
        arguments.validate_args(Namespace(transformer_impl="transformer_engine"))


def initialization_does_not_ask_for_cuda() -> None:
    training = importlib.import_module("megatron.training.training")
    with pytest.raises(AssertionError, match="args is not initialized"):
        training.initialize_megatron()


def index_builder_is_not_compiled_again() -> None:
    importlib.import_module("megatron.core.datasets.utils").compile_helpers()


def hybrid_stack_has_a_norm() -> None:
    # As HybridStack makes the one behind its last layer.
    config = importlib.import_module("megatron.core.transformer").TransformerConfig(
        num_layers=1, hidden_size=2, num_attention_heads=1, normalization="RMSNorm"
    )
    block = importlib.import_module("megatron.core.models.hybrid.hybrid_block")
    norm = block.TENorm(config=config, hidden_size=2, eps=0.0)
    assert norm(torch.tensor([3.0, 3.0])).tolist() == [1.0, 1.0]


IN_ONE_PROCESS: dict[str, Callable[[], None]] = {
    "torch:Tensor.cuda": moves_to_the_device,
    "torch:Tensor.type": has_a_cuda_type_name,
    "torch.cuda:device_count": counts_devices,
    "torch.cuda:current_device": allocates_on_the_current_device,
    "torch.cuda:set_device": sets_the_device,
    "torch.cuda:get_device_properties": reads_the_capability,
    "torch.cuda:Stream": makes_a_stream,
    "torch.cuda:current_stream": asks_for_the_current_stream,
    "torch.cuda:synchronize": synchronizes,
    "torch:get_rng_state": device_draws_leave_the_host_alone,
    "torch:set_rng_state": restoring_the_host_leaves_the_device_alone,
    "torch:manual_seed": seeds_the_host,
    "torch.utils.data:DataLoader.__iter__": loaders_draw_on_the_host,
    "torch.cuda:get_rng_state": reads_the_device_state,
    "torch.cuda.random:get_rng_state": tracker_reads_the_device_state,
    "torch.cuda:set_rng_state": restores_the_device_state,
    "megatron.core.tensor_parallel.random:_set_cuda_rng_state": fork_restores_the_device_state,
    "torch.cuda:manual_seed": seeds_the_device,
    "torch.distributed:all_to_all_single": splits_by_tensors,
    "megatron.training.arguments:validate_args": validation_names_the_flags,
    "megatron.training.training:initialize_megatron": initialization_does_not_ask_for_cuda,
    "megatron.core.datasets.utils:compile_helpers": index_builder_is_not_compiled_again,
    "megatron.core.models.hybrid.hybrid_block:TENorm": hybrid_stack_has_a_norm,
}

OVER_SEVERAL_RANKS = {
    "megatron.core.optimizer:Adam": "the class that training makes; torch's knows no adam_w_mode: TypeError",
    "megatron.core.optimizer:USING_PYTORCH_OPTIMIZER": "if true, torch's own class is made: KeyError 'step' on resume",
    "megatron.core.optimizer.distrib_optimizer:HAVE_APEX_OR_TE": "if false: KeyError on save",
    "megatron.core.optimizer.distrib_optimizer:USING_APEX_OPTIMIZER": "if false, a group empty on rank 0 has no step",
}
"""Patches whose need shows only when a distributed optimizer trains, saves and resumes."""


ALL = (*runtime.PATCHES, *runtime.megatron.patches_of(version("megatron-core")))


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], cpu.Runtime]]:
    entered: list[cpu.Runtime] = []

    def enter(target: str) -> cpu.Runtime:
        kept = tuple(patch for patch in ALL if patch.target != target)
        monkeypatch.setattr(runtime, "PATCHES", kept)
        monkeypatch.setattr(runtime.megatron, "patches_of", lambda version: ())
        entered.append(cpu.enter())
        return entered[0]

    yield enter
    for one in entered:
        one.exit()


def test_each_patch_is_shown_or_argued_to_be_needed() -> None:
    assert set(IN_ONE_PROCESS) | set(OVER_SEVERAL_RANKS) == {patch.target for patch in ALL}
    assert not set(IN_ONE_PROCESS) & set(OVER_SEVERAL_RANKS)
    assert all(OVER_SEVERAL_RANKS.values())


@pytest.mark.parametrize("target", IN_ONE_PROCESS)
def test_call_works_inside(target: str) -> None:
    with cpu.enter():
        IN_ONE_PROCESS[target]()


@pytest.mark.parametrize("target", IN_ONE_PROCESS)
def test_call_fails_without_its_patch(target: str, without: Callable[[str], cpu.Runtime]) -> None:
    without(target)
    # SystemExit: compile_helpers exits when make fails. pytest's own failure: the expected error did not come.
    with pytest.raises((Exception, SystemExit, pytest.fail.Exception)):
        IN_ONE_PROCESS[target]()


@pytest.mark.parametrize(
    "place",
    [
        lambda: torch.zeros(1, device="cuda"),
        lambda: torch.zeros(1, device="cuda:1"),
        lambda: torch.zeros(1, device=torch.device("cuda", 1)),
        lambda: torch.zeros(1).to("cuda"),
        lambda: torch.zeros(1, device=torch.device(f"cuda:{torch.cuda.current_device()}")),
        lambda: torch.zeros(1).to(torch.device(type="cuda", index=0)),
        lambda: torch.nn.Linear(1, 1, device="cuda").weight,
        lambda: torch.nn.Linear(1, 1).to("cuda").weight,
    ],
)
def test_cuda_means_cpu(place: Callable[[], torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        place()
    with cpu.enter():
        assert place().device == torch.device("cpu")


def test_other_devices_and_words_stay() -> None:
    with cpu.enter():
        assert torch.zeros(1, device="meta").device.type == "meta"
        assert torch.device("meta").type == "meta"
    assert placement.on_cpu("cudabar") == "cudabar"
    assert placement.on_cpu(3) == 3


def test_tracker_does_not_warn_about_dropout(caplog: pytest.LogCaptureFixture) -> None:
    with cpu.enter(), caplog.at_level(logging.WARNING):
        tracker = importlib.import_module("megatron.core.tensor_parallel.random").CudaRNGStatesTracker()
        tracker.add("mine", 5)
        with tracker.fork("mine"):
            torch.nn.functional.dropout(torch.ones(3))
    assert "RNG state changed" not in caplog.text


def test_local_world_size_is_the_device_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with cpu.enter():
        assert torch.cuda.device_count() == 4
