"""Curves of several runs as one PNG: losses, their difference to the baseline, step time, bytes, errors."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import Any

from megatron_loco.launch.report_arms import Arm
from megatron_loco.launch.report_runs import (
    BF16,
    ERROR_NORM,
    LOSS,
    RELATIVE_ERROR,
    STEP_TIME,
    VALIDATION_LOSS,
    WIRE,
    Run,
)
from megatron_loco.launch.report_verdict import Verdict, common

# Okabe and Ito's palette, told apart with any colour vision; its yellow is left out, which is faint on white.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = "osD^vPX"
_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
_RING = "#777777"
_DOTS_PER_INCH = 130
_LONGEST_NAME = 48
_MARKS = 15
_FIRST_STEPS = 0.05


@dataclass(frozen=True)
class _Style:
    colour: str
    marker: str
    dash: Any


def require_matplotlib() -> None:
    """Raise ValueError, with the remedy, if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ValueError("--png and --html draw with matplotlib: pip install 'megatron-loco[plot]'") from None


def draw(verdicts: Sequence[Verdict]) -> bytes:
    """Draw the runs.

    Args:
        verdicts: All arms; a colour stands for an arm, a kind of dash for a seed.

    Returns:
        A PNG.

    Raises:
        ValueError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings: Any = {
        "text.parse_math": False,  # a name with two dollar signs is no formula
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e4e4e4",
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "axes.titlesize": 10.5,
        "axes.titlelocation": "left",
        "font.size": 9,
    }
    with matplotlib.rc_context(settings):
        panels = _panels(verdicts)
        rows = math.ceil(len(panels) / 2)
        styles = _styles(verdicts)
        base = next(verdict.arm for verdict in verdicts if verdict.is_baseline)
        names = [(_short(run.name) + (" (baseline)" if arm is base else ""), style) for arm, run, style in styles]
        legend_rows = math.ceil((len(names) + 2) / 3)
        figure = Figure(figsize=(11, 3.2 * rows + 0.25 * legend_rows + 0.2), layout="constrained")
        FigureCanvasAgg(figure)
        axes = list(figure.subplots(rows, 2, squeeze=False).flat)
        for panel, ax in zip(panels, axes, strict=False):
            panel(ax, styles)
            ax.set_xlabel("iteration")
            ax.set_xlim(0, 1.02 * max(run.last_iteration for _, run, _ in styles))
        for ax in axes[len(panels) :]:
            ax.remove()
        _legend(figure, names)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return out.getvalue()


_Styles = list[tuple[Arm, Run, _Style]]
_Panel = Callable[[Any, _Styles], None]


def _panels(verdicts: Sequence[Verdict]) -> list[_Panel]:
    tags = {tag for verdict in verdicts for run in verdict.arm.runs for tag in run.scalars}
    panels: list[_Panel] = [_losses]
    if len(verdicts) > 1:
        panels.append(partial(_difference, verdicts=verdicts))
    if STEP_TIME in tags:
        panels.append(partial(_step_time, verdicts=verdicts))
    if WIRE in tags:
        panels.append(_bytes)
    for tag, title, label in (
        (RELATIVE_ERROR, "Compression error", "|error| / |gradient| of the last step"),
        (ERROR_NORM, "Error state", "norm over all ranks (unit of the gradients)"),
    ):
        if tag in tags:
            panels.append(partial(_error, tag=tag, title=title, label=label))
    return panels


def _styles(verdicts: Sequence[Verdict]) -> _Styles:
    ordered = sorted(verdicts, key=lambda verdict: not verdict.is_baseline)  # black is the baseline's
    return [
        (verdict.arm, run, _Style(COLOURS[i % len(COLOURS)], _MARKERS[i % len(_MARKERS)], _DASHES[j % len(_DASHES)]))
        for i, verdict in enumerate(ordered)
        for j, run in enumerate(verdict.arm.runs)
    ]


def _losses(ax: Any, styles: _Styles) -> None:
    for _, run, style in styles:
        x, y = _curve(run.scalars.get(LOSS, {}))
        ax.plot(x, y, color=style.colour, linewidth=0.7, alpha=0.45)
    for _, run, style in styles:
        _plot(ax, run.scalars.get(VALIDATION_LOSS, {}), style)
    # The fall of the first steps would flatten the rest; a later rise is never cut off.
    series = [run.scalars.get(tag, {}) for _, run, _ in styles for tag in (LOSS, VALIDATION_LOSS)]
    start = _FIRST_STEPS * max(run.last_iteration for _, run, _ in styles)
    later = [value for values in series for i, value in values.items() if i > start and math.isfinite(value)]
    if later and max(later) > min(later):
        margin = 0.05 * (max(later) - min(later))
        ax.set_ylim(min(later) - margin, max(later) + margin)
    ax.set_title("Loss (thin: training, with marks: validation)")
    ax.set_ylabel("loss (nats per token)")


def _difference(ax: Any, styles: _Styles, verdicts: Sequence[Verdict]) -> None:
    base = next(verdict.arm for verdict in verdicts if verdict.is_baseline)
    ax.axhline(0, color=COLOURS[0], linewidth=1.2)
    reach, bar_reach, bars = 0.0, 0.0, 0
    for verdict in verdicts:
        if verdict.is_baseline:
            continue
        arm, tag = verdict.arm, verdict.loss.tag
        points = common([*arm.runs, *base.runs], tag)
        values = {point: _mean(arm, tag, point) - _mean(base, tag, point) for point in points}
        mine = [(run, style) for other, run, style in styles if other is arm]
        _plot(ax, values, replace(mine[0][1], dash="-"))
        curves = [values]
        if len(mine) > 1 and set(arm.seeds) == set(base.seeds):
            by_seed = dict(zip(base.seeds, base.runs, strict=True))
            for seed, (run, style) in zip(arm.seeds, mine, strict=True):
                curves.append({i: run.scalars[tag][i] - by_seed[seed].scalars[tag][i] for i in points})
                ax.plot(*_curve(curves[-1]), color=style.colour, linestyle=style.dash, linewidth=0.7)
        reach = max([reach, *(abs(value) for curve in curves for value in curve.values() if math.isfinite(value))])
        noise, last = verdict.loss.noise, verdict.loss.iteration
        if noise is not None and last is not None and math.isfinite(values[last]):
            # Beside each other: bars of several arms at one iteration would hide each other.
            ax.errorbar(
                [last - 0.012 * bars * last], [values[last]], [noise], color=mine[0][1].colour, capsize=4, linewidth=1.3
            )
            bars += 1
            bar_reach = max(bar_reach, abs(values[last]) + noise)
    tags = {verdict.loss.tag for verdict in verdicts if not verdict.is_baseline}
    kind = "training" if tags == {LOSS} else "validation" if tags == {VALIDATION_LOSS} else "validation or training"
    ax.set_title(f"Difference to the baseline, {kind} loss (bar: ± noise)")
    ax.set_ylabel("difference (nats per token)\nabove 0 is worse")
    if reach or bar_reach:
        # The noise of two seeds can be many times the curves: let it leave the panel rather than flatten them.
        reach = 1.1 * min(max(reach, bar_reach), 3 * reach or bar_reach)
        ax.set_ylim(-reach, reach)
    final = next(verdict.loss.value for verdict in verdicts if verdict.is_baseline)
    if final is not None and math.isfinite(final) and final > 0:
        scale = 100 / final
        # The panel is as high as the difference, however small; the second axis says how small.
        right = ax.secondary_yaxis("right", functions=(lambda y: y * scale, lambda percent: percent / scale))
        right.set_ylabel("% of the baseline's final loss")
        right.spines["right"].set_visible(True)


def _step_time(ax: Any, styles: _Styles, verdicts: Sequence[Verdict]) -> None:
    for _, run, style in styles:
        x, y = _curve(run.scalars.get(STEP_TIME, {}), 1e3)
        ax.plot(x, y, color=style.colour, linestyle=style.dash, linewidth=0.7, alpha=0.6, marker=".", markersize=3)
    for verdict in verdicts:
        if verdict.steps is not None:
            style = next(style for arm, _, style in styles if arm is verdict.arm)
            ax.axhline(verdict.steps.median * 1e3, color=style.colour, linewidth=1.6, linestyle=(0, (6, 2)))
    ax.set_title("Step time (dashes across: median after the warm-up)")
    ax.set_ylabel("time per step (ms)")
    # The first interval can take many times as long (compilation, caches) and is cut off then.
    settled = [value for _, run, _ in styles for i, value in run.scalars.get(STEP_TIME, {}).items() if i > run.warm_up]
    _from_zero(ax, [value * 1e3 for value in settled])


def _bytes(ax: Any, styles: _Styles) -> None:
    for _, run, style in styles:
        x, y = _curve(run.scalars.get(BF16, {}), 1e-6)
        ax.plot(x, y, color=_RING, linewidth=1.2, linestyle=(0, (2, 2)))
        _plot(ax, run.scalars.get(WIRE, {}), style, 1e-6)
    ax.set_title("Gradient bytes on the wire (grey: what bf16 would send)")
    ax.set_ylabel("MB per step and rank")
    _from_zero(ax)


def _error(ax: Any, styles: _Styles, tag: str, title: str, label: str) -> None:
    for _, run, style in styles:
        # Exact steps have no error; their zeros are no measurement.
        _plot(ax, {i: value for i, value in run.scalars.get(tag, {}).items() if i > run.warm_up}, style)
    ax.set_title(f"{title} (after the warm-up)")
    ax.set_ylabel(label)
    _from_zero(ax)


def _plot(ax: Any, values: Mapping[int, float], style: _Style, scale: float = 1.0) -> None:
    x, y = _curve(values, scale)
    every = max(1, len(x) // _MARKS)
    look = {"color": style.colour, "linestyle": style.dash, "marker": style.marker}
    ax.plot(x, y, **look, linewidth=1.3, markersize=3.8, markevery=every)


def _from_zero(ax: Any, heights: Sequence[float] = ()) -> None:
    # As high as ``heights`` ask for, or else as what was drawn.
    heights = [y for y in heights or (y for line in ax.get_lines() for y in line.get_ydata()) if math.isfinite(y)]
    if heights and max(heights) > 0:
        ax.set_ylim(0, 1.08 * max(heights))


def _legend(figure: Any, names: Sequence[tuple[str, _Style]]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=style.colour, linestyle=style.dash, linewidth=1.6, marker=style.marker, markersize=4.5)
        for _, style in names
    ]
    legend = figure.legend(
        handles, [" "] * len(names), loc="outside upper left", ncols=min(3, len(names)), frameon=False, handlelength=3.5
    )
    # Set afterwards: a label that begins with an underscore is left out of a legend.
    for text, (name, _) in zip(legend.get_texts(), names, strict=True):
        text.set_text(name)


def _curve(values: Mapping[int, float], scale: float = 1.0) -> tuple[list[int], list[float]]:
    points = sorted(values)
    return points, [values[i] * scale if math.isfinite(values[i]) else math.nan for i in points]


def _mean(arm: Arm, tag: str, iteration: int) -> float:
    return mean(run.scalars[tag][iteration] for run in arm.runs)


def _short(name: str) -> str:
    half = _LONGEST_NAME // 2
    return name if len(name) <= _LONGEST_NAME else f"{name[: half - 1]}…{name[-half:]}"
