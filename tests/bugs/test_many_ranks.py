"""Ranks without processes: what each would send, and what each would make of it, one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron_loco.config import LoCoConfig
from megatron_loco.core.wire import ParamSpan
from tests._buckets import spans_of, state_of

RANKS = 64
FP16 = torch.float16


class Ranks:
    """The ranks of one bucket in this process; a step is an encode on each and the bytes sent to each."""

    def __init__(
        self,
        numel: int,
        world_size: int,
        spans: Sequence[ParamSpan],
        dtype: torch.dtype,
        num_simulated: int | None = None,
    ) -> None:
        config = LoCoConfig(bits=4, block_size=32, warmup_steps=0)
        self.states = [state_of(numel, world_size, spans, config, dtype) for _ in range(num_simulated or world_size)]
        self.layout = self.states[0].layout
        self.dtype = dtype

    def send(self, grads: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Encode a step on each simulated rank; what it sends to every rank."""
        sends = []
        for state, grad in zip(self.states, grads, strict=True):
            send = torch.full((self.layout.send_bytes,), 0xFF, dtype=torch.uint8)
            state.begin_step()
            state.encode(grad, self.layout, send)
            state.end_step()
            sends.append(send.split(self.layout.send_splits))
        return sends

    def exchange(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Encode a step; what every rank receives."""
        sends = self.send(grads)
        return [torch.cat([send[rank] for send in sends]) for rank in range(self.layout.world_size)]

    def decode(self, received: Tensor, rank: int, divisor: int = 1, *, reader: int = 0) -> Tensor:
        """The shard of ``rank`` as the simulated rank ``reader`` reads it."""
        output = torch.full((self.layout.numel // self.layout.world_size,), math.nan, dtype=self.dtype)
        self.states[reader].backend.decode_sum(received, self.layout, rank, output, divisor=divisor)
        return output


def normal(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------- the limits of fp16


def half(value: float, exact: bool, *, average: bool) -> Tensor:
    """What 64 ranks that all have ``value`` everywhere make of the last shard, in fp16."""
    numel = 32 * RANKS
    rank = Ranks(numel, RANKS, [ParamSpan(0, numel, exact)], FP16, num_simulated=1)
    (sent,) = rank.send([torch.full((numel,), value, dtype=FP16)])
    # Equal ranks send equal bytes.
    return rank.decode(sent[-1].repeat(RANKS), RANKS - 1, RANKS if average else 1)


@pytest.mark.kind(35, 19)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("value", [65504.0, -65504.0, 2.0**-24, -(2.0**-24), 2.0**-14, 1.0])
def test_mean_of_64_ranks_at_the_limits_of_fp16(value: float, exact: bool) -> None:
    # Divided neither before the sum, where 2^-24 would vanish, nor after it in fp16, where 65504 would overflow.
    mean = half(value, exact, average=True)
    # The largest of a block comes back within 3 * 2^-24 (scale, product) and the sum within 64 * 2^-24: next to value
    # there is no other fp16 number within 2^-11.
    assert (mean == value).all()


@pytest.mark.kind(35, 19)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("value", "total"), [(65504.0, math.inf), (2.0**-24, 2.0**-18), (1.0, 64.0), (1023.0, 65472.0)]
)
def test_sum_of_64_ranks_at_the_limits_of_fp16(value: float, total: float, exact: bool) -> None:
    # Overflow is Inf, which the loss scaler sees, and not a large number; all else is exact in fp16.
    assert (half(value, exact, average=False) == total).all()


# ------------------------------------------------------------------------- one meaning of one payload


@pytest.mark.kind(23)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP16])
def test_every_rank_reads_the_same_in_the_same_bytes(dtype: torch.dtype) -> None:
    # Whoever decodes: what a rank knows of its own gradient and error does not enter.
    world_size = 3
    numel = 1021 * world_size
    ranks = Ranks(numel, world_size, spans_of(numel), dtype)
    for step in range(5):
        received = ranks.exchange([normal(numel, 10 * step + rank).to(dtype) for rank in range(world_size)])
        for owner in range(world_size):
            readings = [ranks.decode(received[owner].clone(), owner, reader=reader) for reader in range(world_size)]
            assert all(torch.equal(reading, readings[0]) for reading in readings)


@pytest.mark.kind(23)
def test_the_owner_gets_its_own_gradient_through_the_codec_too() -> None:
    # The exact value of one's own slice would be better, and other than what a replica sees.
    world_size, numel = 2, 256
    ranks = Ranks(numel, world_size, [ParamSpan(0, numel, exact=False)], torch.float32)
    grads = [normal(numel, 1), torch.zeros(numel)]
    for rank, received in enumerate(ranks.exchange(grads)):
        own = grads[0][128 * rank : 128 * (rank + 1)]
        output = ranks.decode(received, rank)
        # A code per element and a scale per block of 32: at most 15 values.
        assert all(len(block.unique()) <= 15 for block in output.view(-1, 32))
        # Half a step, and not nothing.
        steps = own.view(-1, 32).abs().amax(dim=1, keepdim=True) / 7
        off = (output - own).view(-1, 32).abs() / steps
        assert off.max() <= 0.5 + 1e-5
        assert off.max() > 0.4
