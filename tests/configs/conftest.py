"""Training a configuration by the launcher in this process, on forked ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from megatron_loco.launch import __main__, torchrun
from megatron_loco.launch.report import Run
from tests.configs._real_model import ROOT
from tests.integrations.megatron import _training

Train = Callable[..., Run]

ENTRY = "megatron_loco.launch.entry"
SHORTER = (
    "log-interval=1 lr-warmup-iters=2 eval-interval=1000 eval-iters=1 loco.warmup_steps=2 seq-length=128 "
    "max-position-embeddings=128 num-layers=2"
).split()
"""What leaves the kind of model, the layout of ranks and the settings of LoCo as they are."""


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where corpora are prepared, once."""
    return tmp_path_factory.mktemp("data")


def by_forked_ranks(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a torchrun command; the output of a run that fails is printed."""
    entry = words.index(ENTRY)
    (per_node,) = (int(word.partition("=")[2]) for word in words if word.startswith("--nproc-per-node="))
    with pytest.MonkeyPatch.context() as patching:
        for name, value in environment.items():
            patching.setenv(name, value)
        done = _training._launch_by_fork(ENTRY, list(words[entry + 1 :]), per_node)
    if done.returncode:
        print(done.stdout[-6000:])
    return done.returncode


@pytest.fixture
def train(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """A function that trains a configuration of ``configs/cpu`` and returns what was logged."""
    monkeypatch.setattr(torchrun, "run", by_forked_ranks)
    monkeypatch.chdir(ROOT)
    for name in ("DRY_RUN", "MEGATRON_LM_DIR"):
        monkeypatch.delenv(name, raising=False)

    def run(config: str, *words: str, name: str | None = None, iterations: int = 10) -> Run:
        folder = tmp_path / (name or config)
        own = (f"train-iters={iterations}", f"run.data_dir={data_dir}", f"run.output_dir={folder}")
        assert __main__.main([f"configs/cpu/{config}.yaml", *SHORTER, *own, *words]) == 0
        return Run.read(folder)

    return run
