"""A Slurm cluster of emulated nodes, and a checkout to submit from."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm._checkout import make_checkout
from tests.slurm._cluster import Cluster, why_not


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    reason = why_not()
    if reason:
        pytest.skip(f"no Slurm here: {reason}")
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, Cluster(Path(folder) / "cluster", 3) as running:
        yield running


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return make_checkout(tmp_path)
