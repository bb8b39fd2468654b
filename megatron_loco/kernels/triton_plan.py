"""What the Triton kernels need to know of a layout, made once per layout on the device; imports no Triton."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_loco.core.wire import SCALE_BYTES, BucketLayout
from megatron_loco.kernels.schema import NUM_STATISTICS
from megatron_loco.kernels.tables import Table, decode_table, encode_table
from megatron_loco.kernels.triton_settings import ITEM_ELEMENTS, tile

MAX_UNIT = 16
"""Elements: with 16, int8 and uint8 reach 128-bit loads and stores; all else does with 8 or 4."""


@dataclass(frozen=True)
class Plan:
    """One encode of a layout, or one decode of it on a rank; tensors on the device.

    Attributes:
        programs: int64 ``[num_programs, 5]``: first element, number of elements, row of the error state, and bytes of
            codes and scales of consecutive blocks of one run, at most ``tile.rows`` of them.
        exact: int64 ``[num_exact, 3]``: the table's exact ranges, cut into items of at most ``ITEM_ELEMENTS``.
        zeros: int64 ``[num_zeros, 2]``: the table's zeros; of a decode cut into such items.
        partials: fp64 ``[num_programs, NUM_STATISTICS]``: statistics of each program of an encode.
        unit: Largest power of two, up to ``MAX_UNIT``, that divides all starts and lengths of runs, in elements.
        exact_unit: The same of exact items, and of the places of their values in the payload.
    """

    programs: Tensor
    exact: Tensor
    zeros: Tensor
    partials: Tensor
    unit: int
    exact_unit: int


def make_plan(layout: BucketLayout, rank: int, device: torch.device) -> Plan:
    """Make the plan of a decode on ``rank``, or, of -1, of an encode."""
    if rank < 0:
        table = encode_table(layout)
        zeros = table.zeros
    else:
        table = decode_table(layout, rank)
        zeros = _items(table.zeros)
    programs = _programs(layout, table)
    exact = _items(table.exact, layout.exact_itemsize)
    return Plan(
        programs=programs.to(device),
        exact=exact.to(device),
        zeros=zeros.to(device),
        partials=torch.zeros(len(programs) if rank < 0 else 0, NUM_STATISTICS, dtype=torch.float64, device=device),
        unit=_unit(programs[:, :2]),
        exact_unit=_unit(torch.cat([exact[:, :2].flatten(), exact[:, 2] // layout.exact_itemsize])),
    )


def _programs(layout: BucketLayout, table: Table) -> Tensor:
    # A program never spans two runs: what it has to know is then the same for all of its threads. Short runs leave a
    # part of a program idle.
    rows = tile(layout.block_size, layout.bits).rows if table.num_blocks else 1
    programs = [
        (
            element + block * layout.block_size,
            min(numel - block * layout.block_size, rows * layout.block_size),
            row + block,
            codes + block * layout.code_block_bytes,
            scales + block * SCALE_BYTES,
        )
        for element, numel, _, num_blocks, row, codes, scales in table.runs.tolist()
        for block in range(0, num_blocks, rows)
    ]
    return torch.tensor(programs, dtype=torch.int64).view(-1, 5)


def _items(ranges: Tensor, value_bytes: int = 0) -> Tensor:
    # Rows (start, length, ...) cut into pieces of at most ITEM_ELEMENTS; a third column advances by value_bytes each.
    items = [
        [start + done, min(ITEM_ELEMENTS, length - done), *(byte + done * value_bytes for byte in rest)]
        for start, length, *rest in ranges.tolist()
        for done in range(0, length, ITEM_ELEMENTS)
    ]
    return torch.tensor(items, dtype=torch.int64).view(-1, ranges.shape[1])


def _unit(numbers: Tensor) -> int:
    return math.gcd(MAX_UNIT, *numbers.flatten().tolist())
