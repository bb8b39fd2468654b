"""What a checkpoint keeps of bucket states beside the error itself: counters, units, checksums, and a signature that
tells whether a saved error fits.

Counters of several states are one int64 table, a row per state, whose columns have names: a later version may add
columns, and an older one ignores what it does not know.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loco.collectives.agreement import group_device
from megatron_loco.collectives.state import BucketState, Traffic
from megatron_loco.core.checksum import checksum
from megatron_loco.core.error_feedback import ErrorState

_ROW = "row"
_CHECKSUM = "checksum of "


def column_names() -> list[str]:
    """Names of the columns of :func:`save_counters`, which follow from the version of this package alone."""
    return [
        *("step", "unit"),
        *(field.name for field in dataclasses.fields(Traffic)),
        *(_CHECKSUM + name for name in ErrorState.zeros(0, 32, torch.device("cpu")).tensors()),
        _ROW,
    ]


def save_counters(states: Sequence[BucketState]) -> Tensor:
    """Return step, unit, traffic and checksums of the error of each state.

    Args:
        states: At least one; all on one device.

    Returns:
        int64, shape ``[len(states), len(column_names())]``, on the device of the states. Floating-point values
        are the bits of a float64.
    """
    units = torch.stack([state.unit for state in states]).tolist()
    rows = [
        [_to_bits(value) for value in (state.step, unit, *dataclasses.astuple(state.traffic), *sums)]
        for state, unit, sums in zip(states, units, _checksums([s.error.tensors() for s in states]), strict=True)
    ]
    table = torch.tensor(rows, dtype=torch.int64)
    return torch.cat([table, _row_checksums(table)], dim=1).to(states[0].unit.device)


def damaged(states: Sequence[BucketState], table: Tensor, names: Sequence[str]) -> list[str]:
    """Name what differs from its checksum.

    Args:
        states: Their error tensors hold what was read.
        table: What was read of :func:`save_counters`.
        names: The names of its columns when it was saved.

    Returns:
        ``"<state> (<tensor>)"`` of each tensor that is not what was saved; empty if all are.
    """
    return damaged_tensors([(state.name, state.error.tensors()) for state in states], table, names)


def damaged_tensors(
    errors: Sequence[tuple[str, Mapping[str, Tensor]]], table: Tensor, names: Sequence[str]
) -> list[str]:
    """Name what differs from its checksum, before there are states: of pairs of a name and error tensors."""
    table = table.cpu()
    intact = (_row_checksums(table[:, :-1]) == table[:, -1:]).squeeze(1).tolist()
    problems = []
    found = _checksums([tensors for _, tensors in errors])
    for (owner, tensors), row, row_is_intact, sums in zip(errors, table.tolist(), intact, found, strict=True):
        if not row_is_intact:
            problems.append(f"{owner} (counters)")
            continue
        saved = dict(zip(names, row, strict=True))
        for name, actual in zip(tensors, sums, strict=True):
            if saved[_CHECKSUM + name] != actual:
                problems.append(f"{owner} ({name})")
    return problems


def load_counters(states: Sequence[BucketState], table: Tensor, names: Sequence[str]) -> None:
    """Set step, unit and traffic of each state to what was saved; see :func:`damaged` for the arguments."""
    for state, row in zip(states, table.tolist(), strict=True):
        saved = dict(zip(names, row, strict=True))
        state.resume(saved["step"], unit=_to_float(saved["unit"]))
        for field in dataclasses.fields(Traffic):
            if field.name in saved:
                bits = saved[field.name]
                is_float = isinstance(getattr(state.traffic, field.name), float)
                setattr(state.traffic, field.name, _to_float(bits) if is_float else bits)


def signature(state: BucketState) -> object:
    """Everything that the meaning of a state's error tensors depends on, as JSON has it.

    The width of the wire codes is not part of it: the error has its own. Nor are beta and the other settings that may
    change from one step to the next.
    """
    layout = state.layout
    return [
        state.name,
        # In two levels the layout is that of partial sums; which ones, follows from these and the rank.
        [state.exchange.numel, state.exchange.inner_size],
        layout.numel,
        layout.world_size,
        layout.block_size,
        [[run.start, run.stop, run.first_block] for shard in layout.shards for run in shard.runs],
        [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in state.error.tensors().items()],
    ]


@dataclasses.dataclass(frozen=True)
class WorldFacts:
    """Equal on all ranks, from what each rank knows of itself."""

    digest: str
    num_states: int
    error_bytes: int
    step: int


def world_facts(states: Sequence[BucketState], position: object, group: dist.ProcessGroup) -> WorldFacts:
    """Combine the signatures of the states of all ranks. A collective: every rank of ``group`` must call it.

    Args:
        states: Of this rank; may be empty.
        position: What else the meaning of this rank's error depends on, as JSON: rank, parallel coordinates, names of
            parameters.
        group: All ranks of the job.

    Returns:
        ``digest``: equal to another one only if every rank has the position and the signatures it had there; the number
        of states and their bytes over all ranks; the largest step.
    """
    mine = hashlib.sha256(json.dumps([position, [signature(state) for state in states]]).encode()).digest()
    # Summed in pieces of 32 bits, which 2^31 ranks cannot overflow: one small all-reduce, whatever the number of ranks.
    # Each rank's own position is in its hash, so that the order of summation need not be.
    pieces = [int.from_bytes(mine[i : i + 4], "little") for i in range(0, len(mine), 4)]
    error_bytes = sum(state.error.num_bytes for state in states)
    device = group_device(group)
    sums = torch.tensor([*pieces, len(states), error_bytes], dtype=torch.int64, device=device)
    dist.all_reduce(sums, group=group)
    step = torch.tensor(max((state.step for state in states), default=0), dtype=torch.int64, device=device)
    dist.all_reduce(step, op=dist.ReduceOp.MAX, group=group)
    *total, num_states, error_bytes = sums.tolist()
    digest = hashlib.sha256(json.dumps(total).encode()).hexdigest()
    return WorldFacts(digest, num_states, error_bytes, int(step.item()))


def _checksums(errors: Sequence[Mapping[str, Tensor]]) -> list[list[int]]:
    # One transfer from the device for all.
    tensors = [tensor for error in errors for tensor in error.values()]
    sums = iter(torch.stack([checksum(tensor) for tensor in tensors]).tolist())
    return [[next(sums) for _ in error] for error in errors]


def _row_checksums(table: Tensor) -> Tensor:
    # Odd weights: with an even one a change of the top bit alone, the sign, would vanish modulo 2^64.
    weights = 2 * torch.arange(table.shape[1], dtype=torch.int64) + 1
    return (table * weights).sum(dim=1, keepdim=True)


def _to_bits(value: float | int) -> int:
    if isinstance(value, float):
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    return int(value)


def _to_float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
