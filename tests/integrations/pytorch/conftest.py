"""Ranks that stay up for the tests of this folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests._ranks import RankPool

Run = Callable[..., list[Any]]
"""Called as ``run(size, function, *args)``: ``function(group, *args)`` on ``size`` ranks, results in rank order."""


@pytest.fixture(scope="package")
def run() -> Iterator[Run]:
    # A pool per number of ranks: all ranks of a job take part when a mesh makes its groups.
    pools: dict[int, RankPool] = {}
    with contextlib.ExitStack() as stack:

        def run_on(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
            if size not in pools:
                pools[size] = stack.enter_context(RankPool(size))
            return pools[size].run(function, size, *args)

        yield run_on
