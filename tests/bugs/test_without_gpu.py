"""Nothing of CUDA is taken for granted (kind 26); a GPU computes what the CPU does (kinds 36, 38)."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_loco.collectives.reduce_scatter import reduce_scatter
from megatron_loco.collectives.scratch import ScratchPool
from megatron_loco.collectives.state import BucketState
from megatron_loco.config import LoCoConfig
from tests._buckets import layout_of, spans_of, state_of
from tests._ranks import RankPool

RanksOf = Callable[[int], RankPool]

OF_OTHERS = [
    # Parts of Megatron's own program; import Megatron, which imports Triton and otherwise falls back by itself.
    *(f"megatron_loco.launch.{name}" for name in ("pretrain_gpt", "pretrain_releases", "chat_dataset")),
    "megatron_loco.cpu.hybrid_specs",
    # The Triton kernels themselves; the backend loads them when it is chosen.
    *(f"megatron_loco.kernels.triton_{name}" for name in ("numeric", "encode", "decode")),
]

IMPORT_ALL = f"""
import importlib, os, pkgutil, sys
assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
# None makes an import of that name fail, as if it were not installed.
sys.modules.update(dict.fromkeys("triton megatron transformer_engine apex flash_attn cupy numba amp_C".split()))
import torch
import megatron_loco
names = [m.name for m in pkgutil.walk_packages(megatron_loco.__path__, "megatron_loco.")]
assert len(names) > 40, names
for name in names:
    if not name.endswith("__main__") and name not in {OF_OTHERS}:
        importlib.import_module(name)
assert not torch.cuda.is_initialized()
"""


@pytest.mark.kind(26)
def test_every_module_is_imported_without_gpu_and_its_packages() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def _without_cuda(group: dist.ProcessGroup) -> None:
    def call(name: str) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError(f"torch.cuda.{name}() on a machine without CUDA")

        return function

    functions = [
        name
        for name, value in vars(torch.cuda).items()
        if callable(value) and not isinstance(value, type) and name[0] != "_"
    ]
    assert "current_stream" in functions
    with mock.patch.multiple(
        torch.cuda, **{n: call(n) for n in functions if n not in ("is_available", "is_initialized")}
    ):
        for bits, warmup_steps in ((4, 1), (1, 0), (8, 0), (32, 0)):
            config = LoCoConfig(bits=bits, block_size=32, warmup_steps=warmup_steps, rollback="restore")
            numel = 381 * group.size()
            spans = [type(s)(s.start, s.stop, s.exact or config.is_identity) for s in spans_of(numel)]
            state = state_of(numel, group.size(), spans, config)
            for _ in range(3):
                output = torch.full((381,), math.nan)
                reduce_scatter(
                    output, torch.ones(numel), state, op=dist.ReduceOp.AVG, group=group, async_op=True
                ).wait()
                assert output.isfinite().all()
            state.discard()


@pytest.mark.kind(26)
def test_a_reduction_on_the_cpu_asks_nothing_of_cuda(ranks_of: RanksOf) -> None:
    ranks_of(3).run(_without_cuda, 2)


@pytest.mark.kind(36, 38)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: compares it with the CPU")
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gpu_and_cpu_give_the_same_bits(bits: int, dtype: torch.dtype) -> None:
    world_size, numel = 3, 1021 * 3
    config = LoCoConfig(bits=bits, block_size=32, warmup_steps=0)
    layout = layout_of(numel, world_size, spans_of(numel), config, dtype)
    results = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        state = BucketState("bucket", layout, config, device, ScratchPool(device))
        seen = []
        for number in range(4):
            grad = torch.randn(numel, generator=torch.Generator().manual_seed(number)).to(dtype)
            grad[100:700] = 0.0  # whole blocks of zeros
            if number == 2:
                grad[900] = math.nan
            send = torch.full((layout.send_bytes,), 0xFF, dtype=torch.uint8, device=device)
            state.begin_step()
            state.encode(grad.to(device), layout, send)
            state.end_step()
            output = torch.full((numel // world_size,), math.nan, dtype=dtype, device=device)
            received = send[: layout.send_splits[0]].repeat(world_size)
            state.backend.decode_sum(received, layout, 0, output, divisor=world_size)
            seen += [
                send.cpu(),
                output.cpu().nan_to_num(-1.0),
                *(t.clone().cpu() for t in state.error.tensors().values()),
            ]
        results.append(seen)
    assert all(torch.equal(cpu, gpu) for cpu, gpu in zip(*results, strict=True))
