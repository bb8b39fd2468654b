"""Tables of what runs logged to TensorBoard: one run's summary, or several runs side by side.

``python -m megatron_loco.launch.report RUN_DIR [RUN_DIR ...]`` prints loss, validation loss, step time and bytes on the
wire of each run at the same iterations.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

NUM_POINTS = 6
CONSOLE_WIDTH = 120

LOSS = "lm loss"
VALIDATION_LOSS = "lm loss validation"
STEP_TIME = "iteration-time"
WIRE = "loco/wire-bytes-per-step"
BF16 = "loco/bf16-ring-bytes-per-step"
BITS = "loco/bits-per-element"
RELATIVE_ERROR = "loco/relative-compression-error"
ERROR_NORM = "loco/error-state-norm"


@dataclass(frozen=True)
class Run:
    """Scalars that a run logged: ``scalars[tag][iteration]``; of a repeated iteration the last value."""

    name: str
    scalars: dict[str, dict[int, float]]

    @classmethod
    def read(cls, output_dir: Path) -> Run:
        """Read ``<output_dir>/tensorboard``.

        Raises:
            ValueError: there is no such folder, or nothing in it.
        """
        if not (output_dir / "tensorboard").is_dir():
            raise ValueError(
                f"{output_dir / 'tensorboard'} does not exist; is {output_dir} the output directory of a run?"
            )
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        logging.getLogger("tensorboard").setLevel(logging.WARNING)  # it reports each file that it has read to the end
        events = EventAccumulator(str(output_dir / "tensorboard"), size_guidance={"scalars": 0})
        events.Reload()
        tags = events.Tags()["scalars"]
        if not tags:
            raise ValueError(f"{output_dir / 'tensorboard'} holds no scalars; is this the output directory of a run?")
        return cls(output_dir.name, {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in tags})

    def at(self, tag: str, iteration: int) -> float | None:
        """Return the value of ``tag`` at ``iteration``, if it was logged there."""
        return self.scalars.get(tag, {}).get(iteration)

    def final(self, tag: str) -> float | None:
        """Return the last value of ``tag``."""
        values = self.scalars.get(tag)
        return values[max(values)] if values else None


def print_summary(output_dir: Path, unigram_entropy: float | None = None) -> None:
    """Print the table that ends a run.

    Args:
        output_dir: The run's directory.
        unigram_entropy: Entropy of single tokens of the corpus in nats, the loss of a model that knows only how often
            each token occurs.

    Raises:
        ValueError: the run logged nothing there.
    """
    run = Run.read(output_dir)
    table = Table(title=f"{run.name}: what was logged", title_justify="left")
    columns = (
        ("lm loss", LOSS, 1.0, "{:.4f}"),
        ("validation loss", VALIDATION_LOSS, 1.0, "{:.4f}"),
        ("step (ms)", STEP_TIME, 1e3, "{:.0f}"),
        ("wire (MB/step)", WIRE, 1e-6, "{:.3f}"),
        ("in bf16 (MB)", BF16, 1e-6, "{:.3f}"),
        ("bits/element", BITS, 1.0, "{:.2f}"),
        ("relative error", RELATIVE_ERROR, 1.0, "{:.3f}"),
        ("error norm", ERROR_NORM, 1.0, "{:.2e}"),
    )
    shown = [column for column in columns if column[1] in run.scalars]
    table.add_column("iteration", justify="right")
    for header, *_ in shown:
        table.add_column(header, justify="right")
    for iteration in _points([run]):
        table.add_row(str(iteration), *(_cell(run.at(tag, iteration), scale, form) for _, tag, scale, form in shown))
    console = Console(width=None if sys.stdout.isatty() else CONSOLE_WIDTH)
    console.print(table)
    validation = run.final(VALIDATION_LOSS)
    if validation is not None:
        text = f"validation loss {validation:.4f} nats per token"
        if unigram_entropy is not None:
            text += f"; knowing only token frequencies gives {unigram_entropy:.4f}"
        console.print(text)
    # The mean hides the exact warm-up steps; they are paid for, so they count here.
    wire, bf16 = run.scalars.get(WIRE), run.scalars.get(BF16)
    if wire and bf16:
        ratio = sum(bf16.values()) / sum(wire.values())
        console.print(
            f"gradient bytes on the wire, whole run with its exact warm-up: {ratio:.2f} times less than a ring "
            f"reduce-scatter in bf16, {2 * ratio:.2f} times less than in fp32"
        )
    console.print(f"kept in {output_dir}: {', '.join(sorted(path.name for path in output_dir.iterdir()))}")


def print_comparison(runs: Sequence[Run]) -> None:
    """Print losses, step times and wire bytes of several runs at the same iterations."""
    console = Console(width=None if sys.stdout.isatty() else CONSOLE_WIDTH)
    for title, tag, scale, form in (
        ("lm loss", LOSS, 1.0, "{:.4f}"),
        ("validation loss", VALIDATION_LOSS, 1.0, "{:.4f}"),
        ("step time (ms)", STEP_TIME, 1e3, "{:.0f}"),
        ("gradient bytes on the wire (MB/step/rank)", WIRE, 1e-6, "{:.3f}"),
    ):
        logged = [run for run in runs if tag in run.scalars]
        if not logged:
            continue
        table = Table(title=title, title_justify="left")
        table.add_column("iteration", justify="right")
        for run in logged:
            table.add_column(run.name, justify="right")
        for iteration in _points(logged, tag):
            table.add_row(str(iteration), *(_cell(run.at(tag, iteration), scale, form) for run in logged))
        console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m megatron_loco.launch.report", description=__doc__)
    parser.add_argument("run_dir", nargs="+", type=Path, help="output directory of a run")
    try:
        runs = [Run.read(path) for path in parser.parse_args(argv).run_dir]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_comparison(runs)
    return 0


def _points(runs: Sequence[Run], tag: str = STEP_TIME) -> list[int]:
    # Iterations at which all runs logged ``tag``; those with a validation loss if there are several; thinned to
    # NUM_POINTS with the last one always among them.
    common = set.intersection(*(set(run.scalars.get(tag) or run.scalars[LOSS]) for run in runs))
    validated = common.intersection(*(run.scalars.get(VALIDATION_LOSS, {}) for run in runs))
    points = sorted(validated if len(validated) > 2 else common)
    if len(points) <= NUM_POINTS:
        return points
    last = len(points) - 1
    return [points[round(i * last / (NUM_POINTS - 1))] for i in range(NUM_POINTS)]


def _cell(value: float | None, scale: float, form: str) -> str:
    return "" if value is None else form.format(value * scale)


if __name__ == "__main__":
    sys.exit(main())
