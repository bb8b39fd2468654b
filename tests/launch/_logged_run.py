"""Folders of runs that were never trained: TensorBoard logs and settings, written by the test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from megatron_loco.launch import yaml_file
from megatron_loco.launch.report_runs import (
    BF16,
    ERROR_NORM,
    EXACT_STEPS,
    LOSS,
    RELATIVE_ERROR,
    STEP_TIME,
    VALIDATION_LOSS,
    WIRE,
)

Scalars = Mapping[str, Mapping[int, float]]


def write_scalars(folder: Path, scalars: Scalars, *, time: float = 1000.0) -> None:
    """One session of a run: scalars by tag and iteration, logged at ``time`` and one second per iteration later."""
    writer = SummaryWriter(str(folder / "tensorboard"))
    for tag, values in scalars.items():
        for position, (iteration, value) in enumerate(values.items()):
            writer.add_scalar(tag, value, iteration, walltime=time + position)
    writer.close()


def write_settings(folder: Path, *, bits: int | str, comment: str = "", **flags: object) -> None:
    """``resolved.yaml``; flags have underscores for dashes."""
    training = {"train-iters": 200, "seed": 1, "lr": 1e-3} | {k.replace("_", "-"): v for k, v in flags.items()}
    sections = {"run": {"name": folder.name}, "loco": {"bits": bits}, "training": training}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "resolved.yaml").write_text(yaml_file.dump(sections, comment=comment), encoding="utf-8")  # type: ignore[arg-type]


def scalars(
    *,
    loss: float = 2.0,
    wobble: float = 0.0,
    step: float = 0.2,
    loco: bool = False,
    iterations: int = 200,
    eval_interval: int = 20,
) -> dict[str, dict[int, float]]:
    """A run whose losses fall to ``loss``, go up and down by ``wobble``, and that reduces exactly for 20 iterations."""
    intervals = range(10, iterations + 1, 10)
    of_run = {
        LOSS: {i: loss + 10 / i + wobble * (-1) ** i for i in range(1, iterations + 1)},
        VALIDATION_LOSS: {
            i: loss + 10 / i + wobble * (-1) ** (i // eval_interval)
            for i in range(eval_interval, iterations + 1, eval_interval)
        },
        # A first interval that is far off, and a spread of 10 %.
        STEP_TIME: {i: 5.0 if i == 10 else step * (1 + 0.05 * (-1) ** (i // 10)) for i in intervals},
    }
    if loco:
        of_run |= {
            WIRE: {i: 8e6 if i <= 20 else 1e6 for i in intervals},
            BF16: dict.fromkeys(intervals, 4e6),
            RELATIVE_ERROR: {i: 0.0 if i <= 20 else 0.15 for i in intervals},
            ERROR_NORM: {i: 0.0 if i <= 20 else 0.03 for i in intervals},
            EXACT_STEPS: {i: 10.0 if i <= 20 else 0.0 for i in intervals},
        }
    return of_run


def write_run(folder: Path, *, bits: int | str = "off", seed: int = 1, **figures: object) -> Path:
    """A complete run."""
    write_settings(folder, bits=bits, seed=seed)
    write_scalars(folder, scalars(loco=bits != "off", **figures))  # type: ignore[arg-type]
    return folder
