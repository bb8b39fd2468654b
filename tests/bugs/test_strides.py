"""Tensors that do not lie in memory as they read (kind 39): the right result, or an error, and never another value.

Each public function on tensors gets views whose storage order is not their own. Backends check their tensors in one
place, ``kernels/schema.py`` (tests/kernels), and the collectives go through it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loco.collectives.reduce_scatter import reduce_scatter
from megatron_loco.config import LoCoConfig
from megatron_loco.core import quantize
from megatron_loco.core.error_feedback import ErrorState, load_error, reset_error, storage_dither, update_error
from megatron_loco.core.wire import ParamSpan
from tests._buckets import CPU, state_of
from tests._ranks import RankPool

RanksOf = Callable[[int], RankPool]
ROWS, COLUMNS = 6, 64


def transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


def every_other_column(tensor: Tensor) -> Tensor:
    wide = tensor.new_zeros(tensor.shape[0], 2 * tensor.shape[1])
    wide[:, 1::2] = tensor.new_tensor(7)
    wide[:, ::2] = tensor
    return wide[:, ::2]


def every_other_row(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, dim=0)[::2]


def first_row_expanded(tensor: Tensor) -> Tensor:
    return tensor[:1].expand(tensor.shape)


VIEWS: list[Callable[[Tensor], Tensor]] = [
    transposed,
    every_other_column,
    every_other_row,
    first_row_expanded,
]


def values(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if dtype == torch.float32:
        return torch.randn(ROWS, COLUMNS, generator=generator) * torch.logspace(-3, 3, ROWS)[:, None]
    if dtype == torch.int8:
        return torch.randint(-7, 8, (ROWS, COLUMNS), generator=generator, dtype=dtype)
    return torch.randint(0, 256, (ROWS, COLUMNS), generator=generator, dtype=dtype)


def _stored(blocks: Tensor, which: str) -> tuple[Tensor, ...]:
    error = ErrorState.zeros(ROWS, COLUMNS, CPU)
    plain = values(torch.float32)
    old, residual = (blocks, plain) if which == "old" else (plain, blocks)
    update_error(
        error, old, residual, torch.ones(ROWS, dtype=torch.bool), 0.5, storage_dither(0, 0, ROWS, COLUMNS, CPU)
    )
    return error.codes, error.scales


SCALES = torch.logspace(-3, 3, ROWS)
FUNCTIONS: dict[str, tuple[torch.dtype, Callable[[Tensor], tuple[Tensor, ...]]]] = {
    "block_amax": (torch.float32, lambda t: (quantize.block_amax(t),)),
    "quantize 4": (torch.float32, lambda t: quantize.quantize_blocks(t, 4)),
    "quantize 8 with dither": (
        torch.float32,
        lambda t: quantize.quantize_blocks(t, 8, storage_dither(3, 0, ROWS, COLUMNS, CPU)),
    ),
    "dither": (torch.float32, lambda t: quantize.quantize_blocks(values(torch.float32), 8, t.sigmoid())),
    "dequantize": (torch.int8, lambda t: (quantize.dequantize_blocks(t, SCALES),)),
    "pack 2": (torch.int8, lambda t: (quantize.pack_codes(t.clamp(-1, 1), 2),)),
    "pack 4": (torch.int8, lambda t: (quantize.pack_codes(t, 4),)),
    "pack 8": (torch.int8, lambda t: (quantize.pack_codes(t, 8),)),
    "unpack 2": (torch.uint8, lambda t: (quantize.unpack_codes(t, 2),)),
    "unpack 4": (torch.uint8, lambda t: (quantize.unpack_codes(t, 4),)),
    "unpack 8": (torch.uint8, lambda t: (quantize.unpack_codes(t, 8),)),
    "update_error, old": (torch.float32, lambda t: _stored(t, "old")),
    "update_error, residual": (torch.float32, lambda t: _stored(t, "residual")),
    "load_error": (torch.int8, lambda t: (load_error(ErrorState(t, SCALES)),)),
}


@pytest.mark.kind(39)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_view_gives_what_its_copy_gives_or_an_error(name: str, view: Callable[[Tensor], Tensor]) -> None:
    dtype, function = FUNCTIONS[name]
    given = view(values(dtype))
    assert not given.is_contiguous()
    expected = function(given.contiguous())
    before = given.clone()
    try:
        result = function(given)
    except (ValueError, RuntimeError) as error:
        assert any(word in str(error) for word in ("contiguous", "stride", "view size"))  # noqa: PT017
        return
    for mine, right in zip(result, expected, strict=True):
        assert torch.equal(mine, right)
    assert torch.equal(given, before)


@pytest.mark.kind(39)
@pytest.mark.parametrize("view", [transposed, every_other_column, every_other_row])
def test_an_error_in_strided_memory_is_written_where_it_lies(view: Callable[[Tensor], Tensor]) -> None:
    codes = view(torch.zeros(ROWS, COLUMNS, dtype=torch.int8))
    error, plain = ErrorState(codes, torch.zeros(ROWS)), ErrorState.zeros(ROWS, COLUMNS, CPU)
    for state in (error, plain):
        old = load_error(state)
        dither = storage_dither(0, 0, ROWS, COLUMNS, CPU)
        update_error(state, old, values(torch.float32), torch.ones(ROWS, dtype=torch.bool), 0.5, dither)
    assert torch.equal(codes, plain.codes)
    assert codes.any()
    reset_error(error)
    assert not codes.any()


def _through_the_collective(group: dist.ProcessGroup, warmup_steps: int) -> list[str]:
    """What is taken although it does not fit, at the first step."""
    world_size, numel = group.size(), 64 * group.size()
    flat = torch.arange(2.0 * numel)
    wrong: dict[str, dict[str, Tensor]] = {
        "every other element": {"input": flat[::2]},
        "one element, expanded": {"input": torch.ones(1).expand(numel)},
        "two dimensions": {"input": torch.ones(world_size, 64)},
        "transposed": {"input": torch.ones(64, world_size).t()},
        "too short": {"input": torch.ones(numel - world_size)},
        "fp64": {"input": torch.ones(numel, dtype=torch.float64)},
        "other dtype than the layout": {"input": torch.ones(numel, dtype=torch.bfloat16)},
        "output with gaps": {"output": torch.full((128,), math.nan)[::2]},
        "output too long": {"output": torch.full((65,), math.nan)},
        "output of another dtype": {"output": torch.full((64,), math.nan, dtype=torch.float64)},
    }
    taken = []
    for name, change in wrong.items():
        config = LoCoConfig(bits=4, block_size=32, warmup_steps=warmup_steps)
        state = state_of(numel, world_size, [ParamSpan(0, numel, exact=False)], config)
        tensors = {"output": torch.full((64,), math.nan), "input": torch.ones(numel), **change}
        try:
            reduce_scatter(**tensors, state=state, op=dist.ReduceOp.SUM, group=group)
            taken.append(name)
        except ValueError:
            if state.step:
                taken.append(f"{name}: refused, but counted as a step")
        except RuntimeError as error:
            taken.append(f"{name}: {str(error)[:80]}")
    return taken


@pytest.mark.kind(9, 25, 39)
@pytest.mark.parametrize("warmup_steps", [0, 10])
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_does_not_fit_is_refused_at_the_first_step(ranks_of: RanksOf, world_size: int, warmup_steps: int) -> None:
    # And not when the warm-up is over, hours into a run.
    assert ranks_of(3).run(_through_the_collective, world_size, warmup_steps) == [[]] * world_size
