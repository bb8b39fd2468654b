"""Is an arm worse, is it faster, what does it send: figures against a baseline, no verdict stronger than the data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median, quantiles, stdev, variance

from megatron_loco.launch.report_arms import Arm, notes_on_pair, other_data
from megatron_loco.launch.report_runs import BF16, LOSS, STEP_TIME, VALIDATION_LOSS, WIRE, Run

MIN_EVALUATIONS = 4
"""Points of a difference curve that a noise is derived from: a line takes two, and two more show how they scatter."""
MIN_LOSSES = 20
MIN_INTERVALS = 5
"""Logging intervals whose quartiles say something."""
TOO_FEW = "too few points to tell"
TOO_FEW_SEEDS = "too few seeds to tell"

# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom (Abramowitz and Stegun, table 26.10)
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class LossFigures:
    """Loss of an arm against the baseline, at the last iteration that both have.

    Attributes:
        tag: Which loss.
        iteration: Where; ``None`` if the arms have none in common.
        value: Nats per token, mean of the arm's seeds.
        difference: ``value`` minus the baseline's; positive is worse.
        noise: Half-width of the 95 % interval of ``difference``; ``None`` if the data do not show it.
        derived: What the noise was derived from.
        verdict: In words.
    """

    tag: str
    iteration: int | None = None
    value: float | None = None
    difference: float | None = None
    noise: float | None = None
    derived: str = ""
    verdict: str = TOO_FEW


@dataclass(frozen=True)
class StepTimes:
    """Seconds per step over the logging intervals after the warm-up.

    Attributes:
        median: Of all runs together.
        low: Lower quartile of all runs together, or the median of the fastest run if that is lower.
        high: Upper quartile, or the median of the slowest run if that is higher.
        count: Number of intervals.
        runs: Number of runs.
    """

    median: float
    low: float
    high: float
    count: int
    runs: int


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends per step.

    Attributes:
        wire: Median over the logging intervals after the warm-up.
        bf16: The same for a ring reduce-scatter in bf16.
        whole_run: bf16 bytes / bytes on the wire, sums over the whole run with its exact warm-up.
    """

    wire: float
    bf16: float
    whole_run: float


@dataclass(frozen=True)
class Verdict:
    """One row of the table. ``speed_up``: baseline / arm of the medians, lowest and highest from the quartiles."""

    arm: Arm
    is_baseline: bool
    loss: LossFigures
    steps: StepTimes | None
    speed_up: tuple[float, float, float] | None
    speed: str
    traffic: Traffic | None
    notes: list[str]


def judge(all_arms: Sequence[Arm], base: Arm) -> list[Verdict]:
    """Compare every arm with the baseline, which is one of them."""
    warm_up = max(run.warm_up for arm in all_arms for run in arm.runs)
    base_steps = step_times(base, warm_up)
    verdicts = []
    for arm in all_arms:
        steps, traffic = step_times(arm, warm_up), _traffic(arm, warm_up)
        if arm is base:
            verdicts.append(Verdict(arm, True, _own(arm), steps, None, "baseline", traffic, []))
            continue
        speed_up, speed = _speed(steps, base_steps)
        verdicts.append(
            Verdict(arm, False, compare_losses(arm, base), steps, speed_up, speed, traffic, notes_on_pair(arm, base))
        )
    return verdicts


def compare_losses(arm: Arm, base: Arm) -> LossFigures:
    """Compare the last loss that all runs of two arms have, with a noise derived from the runs."""
    runs = [*arm.runs, *base.runs]
    tag = VALIDATION_LOSS if common(runs, VALIDATION_LOSS) else LOSS
    points = common(runs, tag)
    if not points:
        return LossFigures(tag, verdict="no iteration in common")
    last = points[-1]
    mine, other = ([run.scalars[tag][last] for run in side.runs] for side in (arm, base))
    value, difference = mean(mine), mean(mine) - mean(other)
    broken = [run for run in runs if run.not_finite is not None]
    if broken:
        words = ", ".join(f"{run.name} has a loss of NaN or infinity at iteration {run.not_finite}" for run in broken)
        return LossFigures(tag, last, value, difference, None, "", f"not judged: {words}")
    noise, derived, freedom = _noise(arm, base, last, tag)
    if other_data(arm.runs[0], base.runs[0]):
        return LossFigures(tag, last, value, difference, noise, derived, "not judged: trained on other data")
    kind = "" if tag == VALIDATION_LOSS else "training loss, no validation in common: "
    return LossFigures(
        tag, last, value, difference, noise, derived, kind + _words(difference, noise, freedom, len(runs) == 2)
    )


def common(runs: Sequence[Run], tag: str) -> list[int]:
    """Return the iterations at which all runs logged ``tag``, in order."""
    return sorted(set.intersection(*(set(run.scalars.get(tag, {})) for run in runs)))


def step_times(arm: Arm, warm_up: int) -> StepTimes | None:
    """Step times of an arm's runs after iteration ``warm_up``; ``None`` if none was logged there."""
    by_run = [
        [value for iteration, value in run.scalars.get(STEP_TIME, {}).items() if iteration > warm_up and value > 0]
        for run in arm.runs
    ]
    by_run = [values for values in by_run if values]
    seconds = [value for values in by_run for value in values]
    if not seconds:
        return None
    medians = [median(values) for values in by_run]
    low, _, high = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return StepTimes(median(seconds), min(low, *medians), max(high, *medians), len(seconds), len(by_run))


def _own(arm: Arm) -> LossFigures:
    tag = VALIDATION_LOSS if common(arm.runs, VALIDATION_LOSS) else LOSS
    points = common(arm.runs, tag)
    if not points:
        return LossFigures(tag, verdict="baseline")
    return LossFigures(tag, points[-1], mean(run.scalars[tag][points[-1]] for run in arm.runs), verdict="baseline")


def _words(difference: float, noise: float | None, freedom: int, one_seed: bool) -> str:
    if noise is None:
        return TOO_FEW
    if difference == 0 == noise:
        return "the same losses"
    if abs(difference) <= noise:
        if freedom == 1:  # t is 12.7: hardly anything is beyond that
            return TOO_FEW_SEEDS
        return "no difference beyond noise"
    times = f"{abs(difference) / noise:.1f} times the noise" if noise else "noise 0"
    caveat = "; one seed each, others may differ" if one_seed else ""
    return f"{'worse' if difference > 0 else 'better'} by {abs(difference):.4f} ({times}{caveat})"


# Noise, what it was derived from, degrees of freedom.
def _noise(arm: Arm, base: Arm, last: int, tag: str) -> tuple[float | None, str, int]:
    mine, other = ([run.scalars[tag][last] for run in side.runs] for side in (arm, base))
    count, base_count = len(mine), len(other)
    if count == base_count == 1:
        return _noise_of_curve(arm.runs[0], base.runs[0], last, tag)
    if set(arm.seeds) == set(base.seeds):
        by_seed = dict(zip(base.seeds, other, strict=True))
        pairs = [value - by_seed[seed] for seed, value in zip(arm.seeds, mine, strict=True)]
        text = f"differences of {count} seeds, seed by seed"
        return _t(count - 1) * stdev(pairs) / math.sqrt(count), text, count - 1
    if min(count, base_count) == 1:
        several = mine if count > 1 else other
        spread = stdev(several) * math.sqrt(1 + 1 / len(several))
        text = f"spread of the {len(several)} seeds of one arm, taken to be that of the other, which has one seed"
        return _t(len(several) - 1) * spread, text, len(several) - 1
    parts = (variance(mine) / count, variance(other) / base_count)
    text = f"spread of {count} and {base_count} seeds"
    if not sum(parts):
        return 0.0, text, count + base_count - 2
    # Welch: two spreads that need not be equal
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / (count - 1) + parts[1] ** 2 / (base_count - 1))
    return _t(int(freedom)) * math.sqrt(sum(parts)), text, int(freedom)


def _noise_of_curve(run: Run, base: Run, last: int, tag: str) -> tuple[float | None, str, int]:
    points = common([run, base], tag)
    what, least = ("evaluations", MIN_EVALUATIONS) if tag == VALIDATION_LOSS else ("training losses", MIN_LOSSES)
    if len(points) < least and tag == VALIDATION_LOSS:
        tag, what, least = LOSS, "training losses", MIN_LOSSES
        points = [point for point in common([run, base], LOSS) if point <= last]
    points = points[-max(least, math.ceil(len(points) / 2)) :]
    if len(points) < least:
        return None, f"too few common {what}", 0
    curve = [run.scalars[tag][point] - base.scalars[tag][point] for point in points]
    text = f"how the difference scatters about a line through the last {len(points)} common {what}; one seed each"
    return _t(len(points) - 2) * scatter(points, curve), text, len(points) - 2


def scatter(x: Sequence[float], y: Sequence[float]) -> float:
    """Standard deviation of ``y`` about its least-squares line over ``x``; a steady drift is not noise."""
    x_mean, y_mean = mean(x), mean(y)
    slope = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True)) / sum((a - x_mean) ** 2 for a in x)
    squares = (b - y_mean - slope * (a - x_mean) for a, b in zip(x, y, strict=True))
    return math.sqrt(sum(residual**2 for residual in squares) / (len(x) - 2))


def _t(freedom: int) -> float:
    return _T[min(max(freedom, 1), len(_T)) - 1]


def _speed(steps: StepTimes | None, base: StepTimes | None) -> tuple[tuple[float, float, float] | None, str]:
    if steps is None or base is None:
        return None, "no step times in common; set log-timers-to-tensorboard"
    middle, low, high = base.median / steps.median, base.low / steps.high, base.high / steps.low
    if min(steps.count, base.count) < MIN_INTERVALS:
        return (middle, low, high), TOO_FEW
    if low <= 1 <= high:
        return (middle, low, high), "no difference beyond the spread"
    if steps.runs == base.runs == 1:
        return (middle, low, high), f"{middle:.2f} times the speed; one run each: other load is not ruled out"
    return (middle, low, high), f"{'faster' if low > 1 else 'slower'}: {middle:.2f} times the speed"


def _traffic(arm: Arm, warm_up: int) -> Traffic | None:
    wire, bf16, settled, settled_bf16 = 0.0, 0.0, [], []
    for run in arm.runs:
        for iteration in common([run], WIRE):
            sent, ring = run.scalars[WIRE][iteration], run.scalars.get(BF16, {}).get(iteration)
            if ring is None:
                continue
            wire, bf16 = wire + sent, bf16 + ring
            if iteration > warm_up:
                settled.append(sent)
                settled_bf16.append(ring)
    if not settled or not wire:
        return None
    return Traffic(median(settled), median(settled_bf16), bf16 / wire)
