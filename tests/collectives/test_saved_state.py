"""Counters, checksums and signatures of bucket states, as a checkpoint holds them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_loco.collectives.saved_state import (
    WorldFacts,
    column_names,
    damaged,
    load_counters,
    save_counters,
    signature,
    world_facts,
)
from megatron_loco.collectives.state import BucketState
from megatron_loco.config import LoCoConfig
from tests._buckets import spans_of, state_of
from tests._ranks import run_ranks

CONFIG = LoCoConfig(bits=4, block_size=32)


def _state(numel: int = 600, world_size: int = 3, seed: int = 0, **settings: Any) -> BucketState:
    config = dataclasses.replace(CONFIG, **settings)
    state = state_of(numel, world_size, spans_of(numel), config)
    generator = torch.Generator().manual_seed(seed)
    for tensor in state.error.tensors().values():
        tensor.view(torch.uint8).copy_(
            torch.randint(256, tensor.view(torch.uint8).shape, dtype=torch.uint8, generator=generator)
        )
    state.step = 41 + seed
    state.unit.fill_(2.0**-30 / 3)
    state.traffic.sent_bytes = 1e17 / 3 + seed
    state.traffic.bf16_bytes = 0.1
    state.traffic.exact_steps = 10
    state.traffic.compressed_steps = 31 + seed
    return state


def _fresh(like: BucketState) -> BucketState:
    state = _state()
    return BucketState(like.name, like.layout, like.config, like.unit.device, state.scratch)


@pytest.mark.parametrize("error_bits", [0, 8, 16, 32])
def test_counters_come_back_bit_for_bit(error_bits: int) -> None:
    states = [_state(seed=seed, error_bits=error_bits) for seed in range(3)]
    table = save_counters(states)
    assert table.dtype == torch.int64
    assert table.shape == (3, len(column_names()))
    copies = [_fresh(state) for state in states]
    for copy, state in zip(copies, states, strict=True):
        copy.error.copy_(state.error)
    assert damaged(copies, table, column_names()) == []
    load_counters(copies, table, column_names())
    for copy, state in zip(copies, states, strict=True):
        assert (copy.step, copy.traffic) == (state.step, state.traffic)
        assert torch.equal(copy.unit, state.unit)
        assert type(copy.traffic.exact_steps) is int


def test_columns_of_another_version() -> None:
    state = _state()
    # A later version has one more column and an earlier one has one less, each with a row checksum of its own.
    names = column_names()
    table = save_counters([state])[:, :-1]
    position = names.index("bf16_bytes")
    for renamed in (
        [*names[:3], "of the future", *names[3:]],
        [name for name in names if name != "bf16_bytes"],
    ):
        columns = [torch.tensor([7]) if n == "of the future" else table[:, names.index(n)] for n in renamed[:-1]]
        saved = torch.stack(columns, dim=1)
        weights = 2 * torch.arange(saved.shape[1]) + 1
        saved = torch.cat([saved, (saved * weights).sum(1, keepdim=True)], dim=1)
        copy = _fresh(state)
        copy.error.copy_(state.error)
        assert damaged([copy], saved, renamed) == []
        load_counters([copy], saved, renamed)
        assert copy.step == state.step
        assert copy.traffic.sent_bytes == state.traffic.sent_bytes
    assert copy.traffic.bf16_bytes == 0
    assert position > 0


def test_every_damaged_bit_of_the_counters_is_found() -> None:
    states = [_state(seed=1), _state(seed=2)]
    table = save_counters(states)
    for column in range(table.shape[1]):
        for bit in range(64):
            broken = table.clone()
            broken[1, column] ^= 1 << bit if bit < 63 else -(2**63)
            assert damaged(states, broken, column_names()) == ["bucket (counters)"]


def test_damaged_tensors_are_named() -> None:
    states = [_state(seed=1), _state(seed=2)]
    table = save_counters(states)
    states[0].name, states[1].name = "dense bucket 0", "expert bucket 1"
    states[1].error.scales[3] *= -1
    assert damaged(states, table, column_names()) == ["expert bucket 1 (scales)"]
    states[0].error.codes[0, 0] += 1
    assert damaged(states, table, column_names()) == ["dense bucket 0 (codes)", "expert bucket 1 (scales)"]


def test_signature_is_that_of_the_error_alone() -> None:
    same = signature(_state())
    for settings in ({"bits": 8}, {"beta": 0.0}, {"reset_interval": 3}, {"warmup_steps": 0}, {"scale_mode": "fixed"}):
        assert signature(_state(**settings)) == same, settings
    other = [
        _state(block_size=64),
        _state(error_bits=16),
        _state(numel=603),
        _state(world_size=2),
        state_of(600, 3, spans_of(600, exact_every=2), CONFIG),
    ]
    assert len({json.dumps(signature(state)) for state in other} | {json.dumps(same)}) == len(other) + 1


def _facts(rank: int, world_size: int) -> list[WorldFacts]:
    everyone = dist.group.WORLD
    assert everyone is not None
    # The last rank has no state; the others have buckets of their own shapes.
    states = [_state(numel=300 * (rank + 1), seed=rank)] if rank < world_size - 1 else []
    other = [_state(numel=300, block_size=64, seed=rank)] if rank == 1 else states
    return [
        world_facts(states, [rank], everyone),
        world_facts(states, [rank], everyone),
        world_facts(other, [rank], everyone),
        world_facts(states, [(rank + 1) % world_size], everyone),
        world_facts([], [rank], everyone),
    ]


def test_facts_are_equal_on_all_ranks_and_differ_with_any_of_them() -> None:
    ranks = run_ranks(_facts, 4)
    assert all(facts == ranks[0] for facts in ranks)
    first, again, other_state, other_place, none = ranks[0]
    assert first == again
    assert len({facts.digest for facts in (first, other_state, other_place, none)}) == 4
    assert first.step == 43
    assert first.num_states == 3
    assert first.error_bytes == sum(_state(numel=300 * n).error.num_bytes for n in (1, 2, 3))
    assert (none.step, none.num_states, none.error_bytes) == (0, 0, 0)


def test_resume_forgets_what_could_be_discarded() -> None:
    state = _state(rollback="restore")
    state.begin_step()
    state.end_step()
    error = state.error.codes.clone()
    state.resume(7, unit=0.5)
    state.discard()
    assert state.step == 7
    assert state.unit.item() == 0.5
    assert torch.equal(state.error.codes, error)
