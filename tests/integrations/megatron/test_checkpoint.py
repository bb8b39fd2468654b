"""Stopping and resuming Megatron's training loop: LoCo against itself and against stock, in everything that it logs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_loco.launch.report import BITS, ERROR_NORM, RELATIVE_ERROR, Run
from tests.integrations.megatron._checkpoints import damage, truncate
from tests.integrations.megatron._training import MOE, OVERLAP, STOCK, differences, launch, train

LOCO = ("--loco-bits", "4", "--loco-warmup-steps", "3")
FULLY_RESHARDABLE = ("--dist-ckpt-optim-fully-reshardable",)
EXPERTS = (*MOE, "--expert-model-parallel-size", "2", "--untie-embeddings-and-output-weights")
ITERATIONS = 8
GOES_ON = "goes on with the error state of the checkpoint, at step 4"
ANOTHER = "zero error, and step 4 of its own counter: the checkpoint has another layout"


def _saving(folder: Path) -> tuple[str, ...]:
    return "--save", str(folder), "--save-interval", "2", "--ckpt-format", "torch_dist"


def _loading(folder: Path, iteration: int = 4) -> tuple[str, ...]:
    return "--load", str(folder), "--ckpt-step", str(iteration)


def _loco_differences(run: Run, other: Run) -> list[str]:
    """Like :func:`differences`, but of LoCo's own figures, where both runs have them."""
    mine = {tag: values for tag, values in run.scalars.items() if tag.startswith("loco/")}
    assert mine
    return [
        f"{tag} at {iteration}: {value} != {other.scalars[tag][iteration]}"
        for tag, values in mine.items()
        for iteration, value in values.items()
        if value != other.scalars[tag][iteration]
    ]


def _said(output: str) -> list[str]:
    """What LoCo's checkpoint code logged, on all ranks."""
    marker = "megatron_loco.integrations.megatron.checkpoint:LoCo: "
    return [line.partition(marker)[2] for line in output.splitlines() if marker in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def stock(folder: Path) -> Run:
    """A stock run; its checkpoints are in ``folder / "of stock"``."""
    return train(folder / "stock", *_saving(folder / "of stock"), entry=STOCK, iterations=ITERATIONS)


@pytest.fixture(scope="module")
def dense(folder: Path) -> Run:
    """A run with LoCo; its checkpoints are in ``folder / "of dense"``."""
    saving = (*_saving(folder / "of dense"), *FULLY_RESHARDABLE)
    return train(folder / "dense", *LOCO, *OVERLAP, *saving, iterations=ITERATIONS)


@pytest.mark.kind(27)
def test_resume_is_bitwise(folder: Path, dense: Run, tmp_path: Path) -> None:
    loading = (*_loading(folder / "of dense"), "--ckpt-fully-parallel-load")
    process = launch(tmp_path / "resumed", *LOCO, *OVERLAP, *loading, iterations=ITERATIONS, torchrun=True)
    assert process.returncode == 0, process.stdout[-6000:]
    assert _said(process.stdout) == [GOES_ON]
    resumed = Run.read(tmp_path / "resumed")
    assert min(resumed.scalars["lm loss"]) == 5
    assert differences(resumed, dense, first_iteration=5) == []
    assert _loco_differences(resumed, dense) == []
    # Nothing of this would be worth anything if there had been no error.
    assert dense.scalars[ERROR_NORM][4] > 0


@pytest.mark.kind(27)
def test_resume_with_experts_is_bitwise(tmp_path: Path) -> None:
    flags = (*LOCO, *OVERLAP, *EXPERTS)
    straight = train(tmp_path / "straight", *flags, *_saving(tmp_path / "saved"), num_ranks=4, iterations=ITERATIONS)
    resumed = train(tmp_path / "resumed", *flags, *_loading(tmp_path / "saved"), num_ranks=4, iterations=ITERATIONS)
    assert differences(resumed, straight, first_iteration=5) == []
    assert _loco_differences(resumed, straight) == []


@pytest.mark.kind(5)
def test_on_to_off(folder: Path, stock: Run, dense: Run, tmp_path: Path) -> None:
    # Up to there all steps were exact: the weights are those of the stock run.
    off = train(tmp_path / "off", *_loading(folder / "of dense", 2), entry=STOCK, iterations=ITERATIONS)
    assert differences(off, stock, first_iteration=3) == []


@pytest.mark.kind(5)
def test_off_to_on(folder: Path, stock: Run, tmp_path: Path) -> None:
    process = launch(tmp_path / "on", *LOCO, *_loading(folder / "of stock"), iterations=ITERATIONS)
    assert process.returncode == 0, process.stdout[-6000:]
    assert _said(process.stdout) == [
        "zero error, and step 0 of its own counter (the next 3 steps are exact): the checkpoint was written without "
        "LoCo"
    ]
    on = Run.read(tmp_path / "on")
    exact_steps = {iteration: on.scalars["loco/exact-steps"][iteration] for iteration in range(5, 9)}
    assert exact_steps == {5: 1, 6: 1, 7: 1, 8: 0}
    for iteration in (5, 6, 7):
        for tag in ("lm loss", "grad-norm", "params-norm"):
            assert on.scalars[tag][iteration] == stock.scalars[tag][iteration]
    assert on.scalars["lm loss"][8] == stock.scalars["lm loss"][8]
    assert on.scalars[ERROR_NORM][7] == 0
    assert on.scalars[ERROR_NORM][8] > 0


@pytest.mark.kind(6)
@pytest.mark.parametrize(
    ("flags", "num_ranks", "what"),
    [
        ((), 4, "world size 2 -> 4, data parallel size 2 -> 4"),
        (
            ("--tensor-model-parallel-size", "2"),
            4,
            "world size 2 -> 4, tensor parallel size 1 -> 2",
        ),
        (("--ddp-bucket-size", "20000"), 2, "num buckets 2 -> "),
    ],
)
def test_other_sizes_start_with_zero_error(
    folder: Path, dense: Run, tmp_path: Path, flags: tuple[str, ...], num_ranks: int, what: str
) -> None:
    loading = (*LOCO, *OVERLAP, *flags, *_loading(folder / "of dense"))
    process = launch(tmp_path / "resumed", *loading, num_ranks=num_ranks, iterations=ITERATIONS)
    assert process.returncode == 0, process.stdout[-6000:]
    (said,) = _said(process.stdout)
    assert said.startswith(f"{ANOTHER} ({what}")
    resumed = Run.read(tmp_path / "resumed")
    # No second warm-up: the step counter goes on.
    assert BITS in resumed.scalars
    assert all(bits < 5 for bits in resumed.scalars[BITS].values())
    assert resumed.scalars[RELATIVE_ERROR][5] > 0
    # The weights are those of the checkpoint. A mean over other ranks adds in another order (a few units of 2^-24);
    # tensor parallelism rounds partial sums to bf16 (2^-9 of activations, which the mean over 512 tokens evens out).
    tolerance = 1e-3 if "--tensor-model-parallel-size" in flags else 1e-6
    assert resumed.scalars["lm loss"][5] == pytest.approx(dense.scalars["lm loss"][5], rel=tolerance)


def test_damaged_error_stops_and_the_flag_goes_on(folder: Path, dense: Run, tmp_path: Path) -> None:
    shutil.copytree(folder / "of dense", tmp_path / "saved")
    damage(tmp_path / "saved" / "iter_0000004", "loco.rank_1.bucket_0.codes", "flip")
    flags = (*LOCO, *OVERLAP, *_loading(tmp_path / "saved"))
    process = launch(tmp_path / "stops", *flags, iterations=ITERATIONS)
    assert process.returncode != 0
    message = "checksums differ (rank 1: dense bucket 0 (codes)); pass --loco-load-error never to go on with zero error"
    assert process.stdout.count(message) == 2, process.stdout[-6000:]

    process = launch(tmp_path / "goes on", *flags, "--loco-load-error", "never", iterations=ITERATIONS)
    assert process.returncode == 0, process.stdout[-6000:]
    assert _said(process.stdout) == ["zero error, and step 4 of its own counter: --loco-load-error never"]
    assert Run.read(tmp_path / "goes on").scalars["lm loss"][5] == dense.scalars["lm loss"][5]


def test_truncated_file_says_how_to_go_on(folder: Path, dense: Run, tmp_path: Path) -> None:
    shutil.copytree(folder / "of dense", tmp_path / "saved")
    truncate(tmp_path / "saved" / "iter_0000004", "loco.rank_1.bucket_0.codes")
    process = launch(tmp_path / "stops", *LOCO, *OVERLAP, *_loading(tmp_path / "saved"), iterations=ITERATIONS)
    assert process.returncode != 0
    assert "if what cannot be read is an entry 'loco.rank_...', pass --loco-load-error never" in process.stdout


def test_formats_that_hold_no_error(tmp_path: Path) -> None:
    legacy = ("--ckpt-format", "torch")
    saving = ("--save", str(tmp_path / "saved"), "--save-interval", "4", "--exit-interval", "4")
    process = launch(tmp_path / "saves", *LOCO, *legacy, *saving, iterations=ITERATIONS)
    assert process.returncode == 0, process.stdout[-6000:]
    assert _said(process.stdout) == [
        "checkpoints of this run do not hold the error state (--ckpt-format torch; torch_dist would)"
    ]
    process = launch(tmp_path / "loads", *LOCO, *legacy, "--load", str(tmp_path / "saved"), iterations=ITERATIONS)
    assert process.returncode == 0, process.stdout[-6000:]
    assert _said(process.stdout) == [
        "zero error, and step 0 of its own counter (the next 3 steps are exact): a checkpoint of this format holds no "
        "error state"
    ]
