"""Megatron's own training loop: fp16, batch-size ramp-up and evaluation, repeated steps, per-token loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_loco.launch.report import ERROR_NORM, Run
from tests.integrations.megatron import _training
from tests.integrations.megatron._training import MODEL, STOCK, differences, launch, train

REPORT_STATS = ("tests.integrations.megatron._report_stats_entry", "--device", "cpu", "--")
LOSS = "lm loss"
LOSS_SCALE = "loss-scale"
GRAD_NORM = "grad-norm"
"""Logged for the steps that update the weights, and not for those that are skipped."""
IDENTITY = ("--loco-bits", "32", "--loco-warmup-steps", "0")
LOCO = ("--loco-bits", "4", "--loco-warmup-steps", "0", "--loco-reset-interval", "4")


@pytest.mark.kind(1, 3)
def test_fp16_skips_and_scales_are_those_of_stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch_size = MODEL.index("--global-batch-size")
    without = [word for word in (*MODEL[:batch_size], *MODEL[batch_size + 2 :]) if word != "--bf16"]
    monkeypatch.setattr(_training, "MODEL", without)
    # From a scale that overflows fp16 for many steps down to one that fits, then up again every fourth step; batches of
    # 4 samples for the first 4000 tokens and of 8 then; an evaluation every seventh step.
    flags = (
        *("--fp16", "--initial-loss-scale", str(2**32), "--hysteresis", "1", "--loss-scale-window", "4"),
        *("--step-batch-size-schedule", "0:4 4K:8", "--eval-interval", "7"),
    )
    # Not the gather of parameters: Megatron 0.19 cannot turn that off for an evaluation before the first update.
    overlap = "--overlap-grad-reduce"
    iterations = 36
    stock = train(tmp_path / "stock", *flags, entry=STOCK, iterations=iterations)
    first, updated = min(stock.scalars[GRAD_NORM]), set(stock.scalars[GRAD_NORM])
    assert first > 10, "the scale fitted too early"
    assert not updated.issuperset(range(first, iterations + 1)), "no overflow after the scale had grown"
    assert set(stock.scalars["batch-size"].values()) == {4, 8}

    identity = train(tmp_path / "identity", *flags, *IDENTITY, overlap, iterations=iterations)
    assert differences(identity, stock) == []

    loco = train(tmp_path / "loco", *flags, *LOCO, overlap, iterations=iterations)
    # As long as gradients are much the same, so is what overflows.
    until = first + 3
    assert {i for i in loco.scalars[GRAD_NORM] if i <= until} == {i for i in updated if i <= until}
    for i in range(1, until + 1):
        assert loco.scalars[LOSS_SCALE][i] == stock.scalars[LOSS_SCALE][i]
    _assert_learns(loco, stock)
    # Without the loss scale, which is of the order of a million here; 0 at a reset.
    errors = {i: loco.scalars[ERROR_NORM][i] for i in loco.scalars[GRAD_NORM]}
    assert max(errors.values()) > 0
    assert all(error < 10 * loco.scalars[GRAD_NORM][i] for i, error in errors.items())


def _assert_learns(run: Run, stock: Run) -> None:
    # A sanity bound, not a parity claim; see test_training.
    losses, reference = run.scalars[LOSS], stock.scalars[LOSS]
    last = max(reference)
    fall = reference[1] - reference[last]
    assert fall > 0
    assert abs(losses[last] - reference[last]) < 0.25 * fall


@pytest.mark.kind(4)
def test_every_step_repeated_is_the_run_without(tmp_path: Path) -> None:
    # Per-token, because else Megatron divides the loss that it has kept for the comparison in place, and reports that.
    # One iteration reduces nothing.
    flags = (*LOCO, "--loco-rollback", "restore", "--calculate-per-token-loss", "--iterations-to-skip", "4")
    once = train(tmp_path / "once", *flags, "--rerun-mode", "disabled", iterations=11)
    process = launch(tmp_path / "twice", *flags, "--rerun-mode", "report_stats", entry=REPORT_STATS, iterations=11)
    assert process.returncode == 0, process.stdout[-6000:]
    twice = Run.read(tmp_path / "twice")
    assert set(twice.scalars[LOSS]) == set(range(1, 12)) - {4}
    assert differences(twice, once) == []
    assert twice.scalars[ERROR_NORM] == once.scalars[ERROR_NORM]
    # Megatron's own report: nothing that it validates differed between the two passes of a step.
    assert "samples, all identical" in process.stdout
    assert "rel. variability" not in process.stdout


def test_per_token_loss_over_pipeline_stages(tmp_path: Path) -> None:
    # Generated data has no padding: every micro-batch has 2 * 64 tokens, the global batch 512. All powers of two, so
    # that dividing at the end, by a count that only the last stage has, gives the same bits as dividing at the start.
    flags = (*LOCO, "--pipeline-model-parallel-size", "2", "--untie-embeddings-and-output-weights")
    per_batch = train(tmp_path / "per batch", *flags, num_ranks=4)
    per_token = train(tmp_path / "per token", *flags, "--calculate-per-token-loss", num_ranks=4)
    assert differences(per_token, per_batch) == []
    assert per_token.scalars[ERROR_NORM] == pytest.approx(per_batch.scalars[ERROR_NORM], rel=1e-6)
