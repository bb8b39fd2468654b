"""Scratch memory: no two takers share a byte, and the steady state allocates nothing."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from megatron_loco.collectives.scratch import ScratchPool, sizes_in_flight
from tests._buckets import CPU


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_takes_what_was_asked_for() -> None:
    pool = ScratchPool(CPU)
    for num_bytes in (100, 1, 0, 4096):
        taken = pool.take(num_bytes)
        assert (taken.shape, taken.dtype, taken.device) == ((num_bytes,), torch.uint8, CPU)
        assert taken.is_contiguous()
        pool.give_back(taken)


def test_smallest_sufficient_buffer_is_reused() -> None:
    pool = ScratchPool(CPU)
    small, large = pool.take(100), pool.take(1000)
    addresses = {"small": address(small), "large": address(large)}
    pool.give_back(large)
    pool.give_back(small)
    again = pool.take(90)
    assert address(again) == addresses["small"]
    assert address(pool.take(101)) == addresses["large"]
    assert (pool.num_allocations, pool.allocated_bytes) == (2, 1100)


def test_too_small_a_buffer_is_replaced_and_not_added() -> None:
    pool = ScratchPool(CPU)
    pool.give_back(pool.take(100))
    taken = pool.take(200)
    assert (pool.num_allocations, pool.allocated_bytes) == (2, 200)
    pool.give_back(taken)
    # The whole of a buffer comes back, although only its head was lent.
    pool.give_back(pool.take(10))
    pool.take(200)
    assert pool.num_allocations == 2


def test_takers_at_one_time_never_share_memory() -> None:
    source = random.Random(0)
    pool = ScratchPool(CPU)
    taken: list[tuple[int, Tensor]] = []
    for turn in range(2000):
        if taken and source.random() < 0.5:
            mark, tensor = taken.pop(source.randrange(len(taken)))
            assert (tensor == mark).all()  # nobody else wrote there
            pool.give_back(tensor)
        else:
            tensor = pool.take(source.choice((1, 17, 64, 300, 1000)))
            tensor.fill_(turn % 251)
            taken.append((turn % 251, tensor))
    assert len({address(tensor) for _, tensor in taken}) == len(taken)


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_steady_state_allocates_nothing(in_flight: int) -> None:
    # Buckets of several sizes, each with a send and a receive buffer, the oldest finished when too many are in flight.
    sizes = [(700, 680), (64, 64), (1500, 1520), (300, 288), (0, 0)]
    pool = ScratchPool(CPU)
    allocations = []
    for _ in range(20):
        flying: list[tuple[Tensor, Tensor]] = []
        for send, recv in sizes:
            if len(flying) == in_flight:
                for tensor in flying.pop(0):
                    pool.give_back(tensor)
            flying.append((pool.take(send), pool.take(recv)))
        for pair in flying:
            for tensor in pair:
                pool.give_back(tensor)
        allocations.append(pool.num_allocations)
    # Each allocation adds a buffer, of which there are at most two per collective in flight, or replaces one by a
    # larger one of the 10 sizes: it ends, and here within the first steps.
    assert allocations[5:] == [allocations[5]] * 15
    assert pool.allocated_bytes <= in_flight * 2 * 1520


def test_giving_back_twice_is_refused() -> None:
    # Otherwise two collectives would be lent the same bytes.
    pool = ScratchPool(CPU)
    taken = pool.take(10)
    pool.give_back(taken)
    with pytest.raises(AssertionError):
        pool.give_back(taken)


def test_reserved_memory_serves_what_it_was_reserved_for() -> None:
    pool = ScratchPool(CPU)
    pool.reserve([100, 300, 200])
    assert (pool.num_allocations, pool.allocated_bytes) == (3, 600)
    for order in ((300, 200, 100), (100, 200, 300), (50, 250, 200), (90, 91, 92)):
        taken = [pool.take(size) for size in order]
        assert len({address(tensor) for tensor in taken}) == 3
        for tensor in taken:
            pool.give_back(tensor)
    assert pool.num_allocations == 3
    pool.reserve([150, 20])  # there already
    assert pool.num_allocations == 3
    pool.reserve([300, 300, 10, 10])  # one has to grow, and one is missing
    assert (pool.num_allocations, pool.allocated_bytes) == (5, 300 + 300 + 100 + 10)


@pytest.mark.parametrize(
    ("groups", "at_once", "sizes"),
    [
        ([], 2, []),
        ([[]], 2, []),
        ([[5, 7]], 1, [7, 5]),
        ([[5, 7]], 2, [7, 5]),
        ([[5, 7], [6], [1, 1, 1]], 1, [7, 5, 1]),
        ([[5, 7], [6], [1, 1, 1]], 2, [7, 6, 5, 1]),
        ([[5, 7], [6], [1, 1, 1]], 3, [7, 6, 5, 1, 1, 1]),
    ],
)
def test_sizes_of_consecutive_groups(groups: list[list[int]], at_once: int, sizes: list[int]) -> None:
    assert sizes_in_flight(groups, at_once) == sizes
