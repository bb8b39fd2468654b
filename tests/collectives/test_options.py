"""The codec's settings through the whole reduction, on real ranks: configuration, error state, unit, payload."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loco.collectives.reduce_scatter import reduce_scatter
from megatron_loco.config import LoCoConfig
from tests._buckets import Oracle, spans_of, state_of
from tests._ranks import RankPool

INVERSE = 3.0
UNITS = (1.0, 1024.0, 1024.0, 0.5)
"""What gradients are multiplied by, step by step: powers of two, which change no code."""

CASES = [
    LoCoConfig(
        bits=bits,
        error_bits=error_bits,
        scale_mode=mode,
        fixed_inverse_scale=INVERSE,
        block_size=block_size,
        warmup_steps=0,
        reset_interval=0,
    )
    for bits, error_bits, mode, block_size in (
        (1, 16, "block", 96),
        (1, 8, "fixed", 32),
        (2, 32, "block", 4096),
        (2, 0, "fixed", 256),
        (4, 16, "fixed", 32),
        (4, 0, "block", 32),
        (8, 32, "fixed", 64),
    )
]


def gradient(rank: int, step: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank)) * (rank + 1)


def _reduce(group: dist.ProcessGroup, cases: list[LoCoConfig]) -> None:
    world_size, rank = group.size(), group.rank()
    numel = 341 * world_size
    for config in cases:
        state = state_of(numel, world_size, spans_of(numel), config)
        fixed_scale = float(np.float32(1) / np.float32(INVERSE)) if config.scale_mode == "fixed" else None
        oracles = [
            Oracle(state.layout, config.beta, error_bits=config.error_bits, fixed_scale=fixed_scale)
            for _ in range(world_size)
        ]
        for step, unit in enumerate(UNITS):
            grads = [gradient(r, step, numel) for r in range(world_size)]
            output = torch.empty(numel // world_size)
            reduce_scatter(
                output, grads[rank] * unit, state, op=dist.ReduceOp.SUM, group=group, unit=torch.tensor(unit)
            )
            total = torch.zeros(numel)
            for oracle, grad in zip(oracles, grads, strict=True):
                total = total + oracle.send(grad)
            shard = state.layout.shards[rank]
            assert torch.equal(output, total[shard.start : shard.stop] * unit), (config, step)
        assert state.error.bits == config.error_bits
        assert bool(state.error.num_bytes) == bool(config.error_bits)


def test_equals_the_model_bitwise_whatever_the_loss_scale() -> None:
    with RankPool(3) as ranks:
        for world_size in (2, 3):
            ranks.run(_reduce, world_size, CASES)
