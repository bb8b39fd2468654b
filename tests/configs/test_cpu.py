"""The CPU twins train: losses fall, gradients are compressed, also those of experts; and post-training from a base."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_loco.launch.byte_tokens import VOCAB_SIZE
from megatron_loco.launch.report import Run
from megatron_loco.launch.report_runs import BITS, ERROR_NORM, EXACT_STEPS, LOSS, WIRE
from tests.configs._real_model import ROOT
from tests.configs.conftest import Train

TEXT_ENTROPY = 3.31
"""Nats per byte of the corpus for a model that knows only how frequent each byte is (Python 3.12; 3.3 in others)."""

LEARNED = (math.log(VOCAB_SIZE) + TEXT_ENTROPY) / 2
"""A model that knows nothing loses ln(257) = 5.55 nats. Below this it has learned half of what frequencies tell."""

TWINS = {"gpt2": 2, "llama2": 2, "mixtral": 2, "deepseek_moe": 4}
"""Configurations and their ranks; ``llama3`` is trained as the base model below."""

TWO_LAYERS = {"deepseek_moe": ["moe-layer-freq='[0]+[1]'"]}
"""The tests train two layers of each model."""


def check_that_loco_worked(run: Run) -> None:
    scalars = run.scalars
    compressed = [iteration for iteration, count in scalars[EXACT_STEPS].items() if not count]
    assert compressed == list(range(3, len(scalars[LOSS]) + 1))
    for iteration in compressed:
        assert 4 < scalars[BITS][iteration] < 5
        assert scalars[WIRE][iteration] > 0
        assert scalars[ERROR_NORM][iteration] > 0


def test_every_twin_is_trained_here() -> None:
    twins = {path.stem for path in ROOT.glob("configs/cpu/*.yaml")}
    assert twins == {*TWINS, "llama3", "llama3_sft", "llama3_continue"}


@pytest.mark.kind(25)
@pytest.mark.parametrize("config", TWINS)
def test_a_twin_learns_with_compressed_gradients(config: str, train: Train, tmp_path: Path) -> None:
    run = train(config, *TWO_LAYERS.get(config, ()), iterations=12)
    losses = run.scalars[LOSS]
    assert losses[1] == pytest.approx(math.log(384), abs=0.3)  # all 384 rows are equally likely, but for the noise
    assert losses[12] < LEARNED
    check_that_loco_worked(run)
    state = saved(tmp_path / config, "loco.rank_0.")
    buckets = {name.split(".")[2] for name in state if name.endswith(".codes")}
    experts = {name for name in saved(tmp_path / config, "decoder.layers.") if ".experts." in name}
    assert bool(experts) == (config in ("mixtral", "deepseek_moe"))
    # With EP 2 on four ranks every expert has two owners: a second group of ranks with buckets of its own.
    assert len(buckets) == (2 if config == "deepseek_moe" else 1)
    assert all(state[f"loco.rank_0.{bucket}.codes"].any() for bucket in buckets)


def saved(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """Tensors of the newest checkpoint whose names begin with ``prefix``."""
    (checkpoint,) = folder.glob("checkpoints/iter_*")
    reader = dcp.FileSystemReader(checkpoint)
    entries = reader.read_metadata().state_dict_metadata
    wanted = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if name.startswith(prefix) and hasattr(entry, "size")
    }
    dcp.load(wanted, storage_reader=reader, no_dist=True)
    return wanted


def mean(run: Run, first: int, last: int) -> float:
    """Mean loss of some iterations: one alone, of 16 samples with some 40 tokens each that count, is off by 0.1."""
    return sum(run.scalars[LOSS][iteration] for iteration in range(first, last + 1)) / (last - first + 1)


@pytest.mark.kind(25)
def test_post_training(train: Train, tmp_path: Path) -> None:
    base = train("llama3", iterations=12)
    assert base.scalars[LOSS][12] < LEARNED
    check_that_loco_worked(base)
    load = f"load={tmp_path / 'llama3' / 'checkpoints'}"
    before = saved(tmp_path / "llama3", "")

    tuned = train("llama3_sft", load, "lr=2e-3")
    # It starts from the base: far below what random weights lose.
    assert tuned.scalars[LOSS][1] < LEARNED
    assert mean(tuned, 8, 10) < mean(tuned, 1, 3)
    check_that_loco_worked(tuned)
    after = saved(tmp_path / "llama3_sft", "")
    for name in ("embedding.word_embeddings.weight", "output_layer.weight", "decoder.layers.mlp.linear_fc1.weight"):
        assert not torch.equal(after[name], before[name])

    # The first layer and the embedding are as they were, bit for bit; the other layer is not.
    freeze = "run.freeze='embedding.*, decoder.layers.0.*'"
    frozen = train("llama3_sft", load, "lr=2e-3", freeze, name="frozen")
    assert frozen.scalars[LOSS][1] == tuned.scalars[LOSS][1]
    assert mean(frozen, 8, 10) < mean(frozen, 1, 3)
    check_that_loco_worked(frozen)
    after = saved(tmp_path / "frozen", "")
    assert torch.equal(after["embedding.word_embeddings.weight"], before["embedding.word_embeddings.weight"])
    layers = [name for name in after if name.startswith("decoder.layers.") and name.endswith("weight")]
    assert len(layers) == 6
    for name in layers:
        assert torch.equal(after[name][0], before[name][0])
        assert not torch.equal(after[name][1], before[name][1])
    assert not torch.equal(after["output_layer.weight"], before["output_layer.weight"])
    assert frozen.scalars[WIRE][10] < 0.7 * tuned.scalars[WIRE][10]  # half of the parameters are sent

    continued = train("llama3_continue", load, iterations=5)
    assert continued.scalars[LOSS][1] < base.scalars[LOSS][1] - 1
    assert mean(continued, 1, 5) < LEARNED
    check_that_loco_worked(continued)
