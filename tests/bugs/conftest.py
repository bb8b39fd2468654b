"""Ranks that the tests of this folder share: Megatron is imported once per rank and not once per test."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests._ranks import RankPool


@pytest.fixture(scope="session")
def ranks_of() -> Iterator[Callable[[int], RankPool]]:
    """Returns the pool of exactly so many ranks."""
    pools: dict[int, RankPool] = {}
    with ExitStack() as stack:

        def pool(world_size: int) -> RankPool:
            if world_size not in pools:
                pools[world_size] = stack.enter_context(RankPool(world_size))
            return pools[world_size]

        yield pool


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Returns a port of this machine on which nobody listens."""

    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    return find
