"""Ranks of one data-parallel group hold the same parameters (kind 23), by Megatron's own comparison of their hashes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.megatron._training import OVERLAP, launch

STEPS = 50


@pytest.mark.kind(23)
def test_parameters_are_the_same_bits_on_three_ranks_after_every_step(tmp_path: Path) -> None:
    loco = ("--loco-bits", "4", "--loco-warmup-steps", "2", "--loco-min-bucket-numel", "0")
    checked = ("--check-weight-hash-across-dp-replicas-interval", "1", "--global-batch-size", "6")
    done = launch(tmp_path, *loco, *OVERLAP, *checked, num_ranks=3, iterations=STEPS)
    assert done.returncode == 0, done.stdout[-6000:]
    seen = [number for number in range(STEPS + 1) if f"Weight hashes match after {number} iterations" in done.stdout]
    assert seen == list(range(STEPS + 1))
