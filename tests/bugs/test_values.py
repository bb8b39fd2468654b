"""Values through the whole reduction: tiny, zero, of every option, and of sizes that the dtype can just hold."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loco.collectives.reduce_scatter import reduce_scatter
from megatron_loco.collectives.state import BucketState
from megatron_loco.config import LoCoConfig
from megatron_loco.core.error_feedback import load_error
from megatron_loco.core.quantize import max_code
from megatron_loco.core.wire import ParamSpan
from tests._buckets import spans_of, state_of
from tests._ranks import RankPool

RanksOf = Callable[[int], RankPool]
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def normal(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def reduce(state: BucketState, given: Tensor, group: dist.ProcessGroup, op: object = SUM) -> Tensor:
    output = torch.full((state.layout.numel // group.size(),), math.nan, dtype=given.dtype)
    reduce_scatter(output, given, state, op=op, group=group)
    return output


# ------------------------------------------------------------------------------------ magnitudes (kind 19)


def _magnitudes(group: dist.ProcessGroup) -> None:
    # Quantisation knows no absolute size: what 2^k times the gradients give is 2^k times what they give, to the bit,
    # error feedback included. 2^-40 to 2^13 is 10^-12 to 10^4.
    numel = 381 * group.size()
    config = LoCoConfig(bits=4, block_size=32, warmup_steps=0)
    for dtype, average in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        op = AVG if average else SUM
        reference = state_of(numel, group.size(), spans_of(numel), config, dtype)
        scaled = {k: state_of(numel, group.size(), spans_of(numel), config, dtype) for k in (-40, -30, -20, -7, 5, 13)}
        for step in range(3):
            grad = normal(numel, 10 * step + group.rank()).to(dtype)
            right = reduce(reference, grad.clone(), group, op)
            assert right.any()
            for k, state in scaled.items():
                assert torch.equal(reduce(state, grad * 2.0**k, group, op), right * 2.0**k), (dtype, step, k)


@pytest.mark.kind(19)
def test_result_does_not_depend_on_the_magnitude(ranks_of: RanksOf) -> None:
    ranks_of(3).run(_magnitudes, 3)


STEPS = 300


def _constant(group: dist.ProcessGroup) -> Tensor:
    # Elements far below half a step of their block's largest, of gradients that are tiny themselves.
    numel = 256 * group.size()
    config = LoCoConfig(bits=4, block_size=128, warmup_steps=0, beta=0.5, reset_interval=0)
    behind = []
    for magnitude in (1e-4, 1e-9, 1e-12):
        state = state_of(numel, group.size(), [ParamSpan(0, numel, exact=False)], config)
        grad = torch.logspace(-4, 0, numel) * magnitude * (1 + group.rank())
        sent, wanted = torch.zeros(256, dtype=torch.float64), torch.zeros(256, dtype=torch.float64)
        exact = torch.empty(256, dtype=torch.float64)
        dist.reduce_scatter_single(exact, grad.double(), group=group)
        largest = torch.empty(256, dtype=torch.float64)
        blocks = grad.view(-1, 128).amax(dim=1, keepdim=True).expand(-1, 128).reshape(-1).double()
        dist.reduce_scatter_single(largest, blocks.contiguous(), group=group)
        for _ in range(STEPS):
            sent += reduce(state, grad.clone(), group).double()
            wanted += exact
        # In quantisation steps, summed over the ranks.
        behind.append(((sent - wanted).abs() / (largest / 7)).max())
    return torch.stack(behind)


@pytest.mark.kind(19)
def test_constant_tiny_gradients_arrive(ranks_of: RanksOf) -> None:
    # Not sent yet is e / (1 - beta) with |e| at most half a step: 1 step at beta = 0.5. A block's largest |g + e| may
    # be (1 + 1/13) |g| (|e| <= |g| / 13), and so may its step. Storing the error in 8 bits adds a walk of STEPS
    # roundings of standard deviation 1/2 of 1/254 step, over 1 - beta; 6 deviations. Dithers of the ranks are equal:
    # it adds up.
    walk = 6 * math.sqrt(STEPS) * 0.5 / 254 / 0.5
    for behind in ranks_of(3).run(_constant, 2):
        assert (behind <= (1 + walk) * 14 / 13).all(), behind
        # A step of the error, and not of a few: the bound is of use only if it is near.
        assert (behind > 0.05).all()


# ---------------------------------------------------------------------------------------- zeros (kind 38)


def _zeros(group: dist.ProcessGroup) -> None:
    world_size, rank = group.size(), group.rank()
    numel = 1024 * world_size
    for bits, error_bits, block_size in itertools.product((1, 2, 4, 8, 32), (0, 8, 16, 32), (32, 256)):
        config = LoCoConfig(bits=bits, error_bits=error_bits, block_size=block_size, warmup_steps=0)
        spans = [ParamSpan(0, numel, exact=config.is_identity)]
        state = state_of(numel, world_size, spans, config)
        for zero in (0.0, -0.0):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                output = reduce(state, torch.full((numel,), zero), group)
            assert not output.any()
            assert output.isfinite().all()
            assert not load_error(state.error).any()
        # Zeros on one rank only, and a zero block in front of others: 256 zeros first, as in the report.
        grad = normal(numel, 3 + rank) if rank else torch.zeros(numel)
        grad[:256] = 0.0
        output = reduce(state, grad, group)
        assert output.isfinite().all()
        if rank == 0:
            assert not output[:256].any()
            assert output[256:].any()
            assert not load_error(state.error).any()
        # A single element that is not zero comes through, and nothing else does.
        state = state_of(numel, world_size, spans, config)
        grad = torch.zeros(numel)
        grad[numel - 2] = -3e-9 * (rank == 0)
        output = reduce(state, grad, group)
        if rank == world_size - 1 and bits != 1:  # one bit is the mean of its block's magnitudes
            # Its block's largest: three roundings of scale and product.
            assert abs(output[-2].item() / -3e-9 - 1) <= 4 * 2**-24 + 2**-24
            output[-2] = 0.0
        if bits != 1:
            assert not output.any()


@pytest.mark.kind(38)
def test_zero_blocks_and_zero_ranks(ranks_of: RanksOf) -> None:
    ranks_of(3).run(_zeros, 2)


def _always_zero(group: dist.ProcessGroup) -> None:
    # Padded vocabulary, masked positions: zeros among elements of the same block that are not.
    numel = 512 * group.size()
    zero = torch.zeros(numel, dtype=torch.bool)
    zero[::3] = True
    zero[40:70] = True
    shard = zero.chunk(group.size())[group.rank()]
    for bits, error_bits in ((2, 8), (4, 8), (4, 16), (8, 32)):
        config = LoCoConfig(bits=bits, error_bits=error_bits, block_size=32, warmup_steps=0, reset_interval=0)
        state = state_of(numel, group.size(), [ParamSpan(0, numel, exact=False)], config)
        for number in range(200):
            grad = normal(numel, 10 * number + group.rank())
            grad[zero] = 0.0
            output = reduce(state, grad, group)
            assert not output[shard].any()
            assert output[~shard].any()
        assert not load_error(state.error).view(-1)[zero].any()


@pytest.mark.kind(29)
def test_an_element_whose_gradient_is_always_zero_never_moves(ranks_of: RanksOf) -> None:
    ranks_of(3).run(_always_zero, 2)


# ------------------------------------------------------------------------------------ randomness (kind 36)


def _random_state(group: dist.ProcessGroup) -> None:
    # The model's dropout must not depend on whether LoCo is on.
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for settings in ({"bits": 4}, {"bits": 1}, {"bits": 4, "scale_mode": "fixed"}, {"bits": 8, "error_bits": 16}):
        config = LoCoConfig(block_size=32, warmup_steps=1, **settings)
        state = state_of(512, group.size(), spans_of(512), config)
        for _ in range(3):
            reduce(state, torch.ones(512), group)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.kind(36)
def test_generators_of_the_model_are_left_alone(ranks_of: RanksOf) -> None:
    ranks_of(3).run(_random_state, 2)


# ------------------------------------------------------------------- every accepted option has a bound


def _within_the_bound(group: dist.ProcessGroup, settings: Sequence[dict[str, int]]) -> list[dict[str, int]]:
    world_size, rank = group.size(), group.rank()
    numel = 4096 * 2 * world_size
    wrong = []
    for setting in settings:
        config = LoCoConfig(warmup_steps=0, **setting)
        state = state_of(numel, world_size, [ParamSpan(0, numel, exact=config.is_identity)], config)
        grads = [normal(numel, seed) for seed in range(world_size)]
        output = reduce(state, grads[rank].clone(), group)
        shard = slice(rank * numel // world_size, (rank + 1) * numel // world_size)
        total = sum((grad[shard].double() for grad in grads), torch.zeros(numel // world_size, dtype=torch.float64))
        # First step, no error yet: half a step of the block per rank, in which the roundings of the quantiser (see
        # test_quantize.py) and of the sum vanish. One bit: |h - s| with s the mean magnitude of the block, so the
        # larger of the two.
        bound = torch.zeros(numel // world_size, dtype=torch.float64)
        for grad in grads:
            for start in range(shard.start, shard.stop, config.block_size):
                block = grad[start : min(start + config.block_size, shard.stop)].abs().double()
                here = slice(start - shard.start, start - shard.start + block.numel())
                if config.bits == 1:
                    bound[here] += torch.maximum(block, block.mean())
                elif not config.is_identity:
                    bound[here] += block.amax() / max_code(config.bits) / 2
        if not ((output.double() - total).abs() <= bound * (1 + 1e-5) + 1e-6).all():
            wrong.append(setting)
    return wrong


def test_every_block_size_and_width_has_an_error_bound(ranks_of: RanksOf) -> None:
    # Accepted block sizes of 1024 and more gave large errors elsewhere (bitsandbytes, issue 565).
    settings = [{"bits": 4, "block_size": size} for size in range(32, 4097, 32)]
    settings += [{"bits": bits, "block_size": size} for bits in (1, 2, 8, 32) for size in (32, 96, 1024, 4064, 4096)]
    assert ranks_of(3).run(_within_the_bound, 2, settings) == [[], []]


# ---------------------------------------------------------------------- coalesced in a group of size one


def _coalesced_alone(group: dist.ProcessGroup) -> None:
    config = LoCoConfig(bits=4, block_size=32, warmup_steps=0)
    for dtype, op in itertools.product(DTYPES, (SUM, AVG)):
        states = [state_of(numel, 1, spans_of(numel), config, dtype) for numel in (1, 381)]
        grads = [normal(state.layout.numel, 5).to(dtype) for state in states]
        outputs = [torch.full_like(grad, math.nan) for grad in grads]
        with dist._coalescing_manager(group, async_ops=True) as manager:
            for output, grad, state in zip(outputs, grads, states, strict=True):
                reduce_scatter(output, grad, state, op=op, group=group, async_op=True)
        manager.wait()  # the exact reductions are its own
        assert all(torch.equal(output, grad) for output, grad in zip(outputs, grads, strict=True))


@pytest.mark.kind(15, 20)
def test_coalesced_reductions_in_a_group_of_one_rank(ranks_of: RanksOf) -> None:
    # Crashed elsewhere (intel/torch-xpu-ops, issue 1872). Megatron's expert groups of one rank look like this.
    ranks_of(3).run(_coalesced_alone, 1)
