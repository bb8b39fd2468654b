"""Reports on runs from what they logged to TensorBoard: one run's summary, or several runs against a baseline.

``python -m megatron_loco.launch.report RUN_DIR [RUN_DIR ...]`` prints loss, validation loss, step time and bytes on the
wire of each run at the same iterations, and with several runs a verdict; ``--png``, ``--html`` and ``--json`` keep
them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_loco.launch import report_figures, report_page
from megatron_loco.launch.report_arms import arms, baseline
from megatron_loco.launch.report_runs import (
    BF16,
    BITS,
    ERROR_NORM,
    LOSS,
    RELATIVE_ERROR,
    STEP_TIME,
    VALIDATION_LOSS,
    WIRE,
    Run,
    read_runs,
)
from megatron_loco.launch.report_verdict import Verdict, judge

__all__ = [
    *("BF16", "BITS", "ERROR_NORM", "LOSS", "RELATIVE_ERROR", "STEP_TIME", "VALIDATION_LOSS", "WIRE", "Run"),
    *("main", "print_comparison", "print_summary", "print_verdict"),
]

NUM_POINTS = 6
CONSOLE_WIDTH = 120


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
    table = Table(title=f"{escape(run.name)}: what was logged", title_justify="left")
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
    if wire and bf16 and any(wire.values()):  # one data-parallel rank sends nothing
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
            table.add_column(escape(run.name), justify="right")
        for iteration in _points(logged, tag):
            table.add_row(str(iteration), *(_cell(run.at(tag, iteration), scale, form) for run in logged))
        console.print(table)


def print_verdict(verdicts: Sequence[Verdict]) -> None:
    """Print each arm against the baseline, and what limits the comparison."""
    console = Console(width=None if sys.stdout.isatty() else CONSOLE_WIDTH)
    rows = [report_page.row(verdict) for verdict in verdicts]
    names = [row[0] for row in rows]
    # Upright, one column per arm: ten columns do not fit a terminal.
    table = Table(title="verdict", title_justify="left", show_lines=False)
    table.add_column("")
    for name in names:
        table.add_column(escape(name))
    for index, header in enumerate(report_page.HEADERS[1:], start=1):
        table.add_row(header, *(escape(row[index]) for row in rows))
    console.print(table)
    for name, note in report_page.notes(verdicts):
        console.print(f"note: {escape(name)}: {escape(note)}", highlight=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 0, or 2 for a mistake in the input."""
    parser = argparse.ArgumentParser(prog="python -m megatron_loco.launch.report", description=__doc__)
    parser.add_argument("run_dir", nargs="+", type=Path, help="output directory of a run")
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="RUN_DIR",
        help="the run that the others are compared with, one of them or another; default: the first without LoCo, or "
        "else the first; other runs that differ from it only in the seed count with it",
    )
    parser.add_argument("--png", type=Path, metavar="PATH", help="draw the curves (needs matplotlib)")
    parser.add_argument("--html", type=Path, metavar="PATH", help="write one page with curves and tables (the same)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the verdicts")
    options = parser.parse_args(argv)
    try:
        _report(options.run_dir, options.baseline, options.png, options.html, options.json)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _report(folders: list[Path], base: Path | None, png: Path | None, html: Path | None, json: Path | None) -> None:
    files = [path for path in (png, html, json) if path is not None]
    for path in files:
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ValueError(f"{path} cannot be written: it is a folder, or its folder does not exist")
    if len({path.absolute() for path in files}) < len(files):
        raise ValueError("--png, --html and --json must name different files")
    if png is not None or html is not None:
        report_figures.require_matplotlib()  # before minutes of reading
    position = None
    if base is not None:
        resolved = [folder.resolve() for folder in folders]
        if base.resolve() not in resolved:
            folders, resolved = [base, *folders], [base.resolve(), *resolved]
        position = resolved.index(base.resolve())
    runs = read_runs(folders)
    all_arms = arms(runs)
    verdicts = judge(all_arms, baseline(all_arms, None if position is None else runs[position]))
    print_comparison(runs)
    if len(runs) > 1:
        print_verdict(verdicts)
    image = report_figures.draw(verdicts) if png is not None or html is not None else b""
    try:
        if png is not None:
            png.write_bytes(image)
        if html is not None:
            html.write_text(report_page.html(verdicts, image), encoding="utf-8")
        if json is not None:
            json.write_text(report_page.as_json(verdicts), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be written: {error.strerror}") from None
    for path in files:
        print(f"written: {path}")


def _points(runs: Sequence[Run], tag: str = STEP_TIME) -> list[int]:
    # Iterations at which all runs logged ``tag``; those with a validation loss if there are several; thinned to
    # NUM_POINTS with the last one always among them.
    common = set.intersection(*(set(run.scalars.get(tag) or run.scalars.get(LOSS, {})) for run in runs))
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
