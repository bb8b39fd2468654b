"""Megatron's own training loop, stock against LoCo, over every parallel layout that runs on CPU ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_loco.launch.report import BITS, ERROR_NORM, RELATIVE_ERROR, Run
from tests.integrations.megatron._training import IMPORT_LINE, MOE, OVERLAP, STOCK, differences, launch, train

IDENTITY = ("--loco-bits", "32", "--loco-warmup-steps", "0")
LOCO = ("--loco-bits", "4", "--loco-warmup-steps", "2")


def _assert_trains(run: Run, stock: Run) -> None:
    # A sanity bound, not a parity claim: within 8 steps at this learning rate the loss falls by far more than 4-bit
    # noise moves it (seen: 0.01), so a wrong sign, scale or shard shows.
    losses, reference = run.scalars["lm loss"], stock.scalars["lm loss"]
    fall = reference[1] - reference[max(reference)]
    assert fall > 0
    for iteration, loss in losses.items():
        assert abs(loss - reference[iteration]) < 0.25 * fall, (iteration, loss, reference[iteration])


@pytest.mark.kind(26)
def test_off_identity_and_overlap(tmp_path: Path) -> None:
    iterations = 20
    stock = train(tmp_path / "stock", entry=STOCK, iterations=iterations)
    off = train(tmp_path / "off", iterations=iterations, torchrun=True)
    assert differences(off, stock) == []
    identity = train(tmp_path / "identity", *IDENTITY, *OVERLAP, iterations=iterations)
    assert differences(identity, stock) == []
    # fp32 values, and nothing for the few elements of padding.
    assert all(31.9 < bits < 32 for bits in identity.scalars[BITS].values())

    loco = train(tmp_path / "loco", *LOCO, iterations=iterations)
    overlapped = train(tmp_path / "overlapped", *LOCO, *OVERLAP, iterations=iterations)
    assert differences(loco, overlapped) == []
    imported = train(tmp_path / "imported", *LOCO, entry=IMPORT_LINE, iterations=iterations, torchrun=True)
    assert differences(loco, imported) == []
    assert loco.scalars["lm loss"][2] == stock.scalars["lm loss"][2]
    assert loco.scalars["lm loss"][20] != stock.scalars["lm loss"][20]
    _assert_trains(loco, stock)
    for tag in (RELATIVE_ERROR, ERROR_NORM):
        assert loco.scalars[tag][2] == 0
        assert loco.scalars[tag][3] > 0
    # 4 bits, one fp32 scale per 256 elements, exact 1-D parameters, padding of this small model.
    assert loco.scalars[BITS][2] == 32
    assert 4.125 < loco.scalars[BITS][3] < 4.3


@pytest.mark.kind(12)
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("tensor parallel", ("--tensor-model-parallel-size", "2", "--untie-embeddings-and-output-weights")),
        # Tied embeddings: the first and the last stage hold a copy each, reduced once more over the embedding group.
        ("pipeline parallel", ("--pipeline-model-parallel-size", "2")),
        (
            "interleaved pipeline",
            (
                *("--pipeline-model-parallel-size", "2", "--num-layers", "4"),
                *("--num-layers-per-virtual-pipeline-stage", "1", "--untie-embeddings-and-output-weights"),
            ),
        ),
        ("expert parallel", (*MOE, "--expert-model-parallel-size", "2", "--untie-embeddings-and-output-weights")),
    ],
)
def test_parallel_layouts(tmp_path: Path, name: str, flags: tuple[str, ...]) -> None:
    # Groups of two data-parallel ranks: the identity codec is bitwise the stock reduce-scatter.
    stock = train(tmp_path / "stock", *flags, entry=STOCK, num_ranks=4)
    identity = train(tmp_path / "identity", *flags, *OVERLAP, *IDENTITY, num_ranks=4)
    assert differences(identity, stock) == []
    _assert_trains(train(tmp_path / "loco", *flags, *OVERLAP, *LOCO, num_ranks=4), stock)


def test_resume_of_the_plain_checkpoint(tmp_path: Path) -> None:
    saving = ("--save", str(tmp_path / "checkpoints"), "--save-interval", "4", "--ckpt-format", "torch_dist")
    loading = ("--load", str(tmp_path / "checkpoints"), "--ckpt-step", "4")
    # Four ranks and embeddings larger than a shard: rank 0 owns nothing of one of the optimizer's parameter groups,
    # which is where the optimizer that stands in for the fused one could resume wrongly without a word.
    embeddings = ("--vocab-size", "8000", "--untie-embeddings-and-output-weights")
    large = (*IDENTITY, *OVERLAP, *embeddings)
    straight = train(tmp_path / "straight", *large, *saving, num_ranks=4)
    resumed = train(tmp_path / "resumed", *large, *loading, num_ranks=4)
    assert min(resumed.scalars["lm loss"]) == 5
    assert differences(resumed, straight, first_iteration=5) == []

    process = launch(tmp_path / "loco", *LOCO, *loading, *embeddings, num_ranks=4)
    assert process.returncode == 0, process.stdout[-6000:]
    # Exact values leave no error to go on with, and no need for another warm-up.
    assert process.stdout.count("zero error, and step 4 of its own counter: the checkpoint has another layout") == 1
    assert "(--loco-bits 32 -> 4)" in process.stdout
    loco = Run.read(tmp_path / "loco")
    assert loco.scalars["lm loss"][5] == straight.scalars["lm loss"][5]
    assert loco.scalars[RELATIVE_ERROR][5] > 0


def test_bad_flags_stop_before_any_work(tmp_path: Path) -> None:
    flags = ("--loco-bits", "4", "--calculate-per-token-loss", "--overlap-grad-reduce")
    process = launch(tmp_path / "bad", *flags, num_ranks=1)
    assert process.returncode != 0
    assert "--calculate-per-token-loss: gradients are sums over tokens" in process.stdout
    assert "building GPT model" not in process.stdout
