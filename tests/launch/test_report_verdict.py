"""Noise and verdicts on curves whose noise is known, and which runs belong together."""

from __future__ import annotations

import random
from statistics import mean, stdev

import pytest

from megatron_loco.launch.report_arms import Arm, arms, notes_on_pair, notes_on_run
from megatron_loco.launch.report_runs import EXACT_STEPS, LOSS, STEP_TIME, VALIDATION_LOSS, Run
from megatron_loco.launch.report_verdict import (
    TOO_FEW,
    TOO_FEW_SEEDS,
    LossFigures,
    compare_losses,
    judge,
    scatter,
    step_times,
)


def _run(
    name: str,
    validation: list[float] | dict[int, float],
    *,
    seed: int = 1,
    bits: int | str = "off",
    times: list[float] | None = None,
    loss: dict[int, float] | None = None,
    **settings: object,
) -> Run:
    curve = validation if isinstance(validation, dict) else {10 * (i + 1): v for i, v in enumerate(validation)}
    scalars = {LOSS: loss or {max(curve): 1.0}, VALIDATION_LOSS: curve}
    if times is not None:
        scalars[STEP_TIME] = {10 * (i + 1): value for i, value in enumerate(times)}
    return Run(name, scalars, {"seed": seed, "loco.bits": bits, **settings})  # type: ignore[arg-type]


def _compare(mine: list[Run], base: list[Run]) -> LossFigures:
    return compare_losses(Arm("mine", tuple(mine)), Arm("base", tuple(base)))


FLAT = [2.0] * 8
ZIGZAG = [0.01, -0.01, -0.01, 0.01]  # no slope, squares sum to 4e-4, two degrees of freedom


def test_one_seed_each() -> None:
    # 4.303 is t(0.975, 2); the last half of eight evaluations is four.
    noise = 4.303 * (4e-4 / 2) ** 0.5
    worse = _compare([_run("a", [9, 9, 9, 9, *(2.1 + z for z in ZIGZAG)])], [_run("b", FLAT)])
    assert worse.difference == pytest.approx(0.11)
    assert worse.noise == pytest.approx(noise)
    assert worse.verdict == f"worse by 0.1100 ({0.11 / noise:.1f} times the noise; one seed each, others may differ)"
    better = _compare([_run("a", [9, 9, 9, 9, *(1.9 + z for z in ZIGZAG)])], [_run("b", FLAT)])
    assert better.verdict.startswith("better by 0.0900")
    assert _compare([_run("a", [2 + z for z in ZIGZAG * 2])], [_run("b", FLAT)]).verdict == "no difference beyond noise"
    assert _compare([_run("a", FLAT)], [_run("b", FLAT)]).verdict == "the same losses"


def test_a_steady_drift_is_not_noise() -> None:
    # Were the spread about the mean the noise, a run that falls behind ever more would hide in it.
    drifting = _compare([_run("a", [2.1 + 0.1 * i for i in range(8)])], [_run("b", FLAT)])
    assert drifting.verdict.startswith("worse by 0.8000")
    assert scatter([1, 2, 3, 4], [1.5, 2.5, 3.5, 4.5]) == pytest.approx(0, abs=1e-12)


def test_few_evaluations_take_the_training_loss_or_say_so() -> None:
    losses = {i: 2 + 0.01 * (-1) ** i for i in range(1, 41)}
    base, flat = _run("b", [2.0] * 3), dict.fromkeys(range(1, 41), 2.0)
    assert _compare([_run("a", [2.5] * 3)], [base]).verdict == TOO_FEW
    few = _compare([_run("a", [2.5] * 3, loss=losses)], [_run("b", [2.0] * 3, loss=flat)])
    assert few.tag == VALIDATION_LOSS
    assert "last 20 common training losses" in few.derived
    # Up to iteration 30, where the last common evaluation is: 11 to 30, alternating, t(0.975, 18) = 2.101. The small
    # slope of an alternating row changes the spread by less than a percent.
    assert few.noise == pytest.approx(2.101 * 0.01 * (20 / 18) ** 0.5, rel=0.01)
    # No evaluation in common: the training losses are what is compared.
    apart = _compare([_run("a", {5: 1.0}, loss=losses)], [_run("b", {6: 1.0}, loss=flat)])
    assert (apart.tag, apart.iteration) == (LOSS, 40)
    assert apart.verdict == "training loss, no validation in common: no difference beyond noise"
    assert _compare([_run("a", {5: 1.0})], [_run("b", {6: 1.0})]).verdict == "no iteration in common"


def test_seeds_in_pairs() -> None:
    # Seeds differ by 0.5 and the arms by 0.02 +- 0.001: only seed by seed does that show.
    start = {1: 1.0, 2: 1.5, 3: 2.0}
    extra = {1: 0.019, 2: 0.020, 3: 0.021}
    base = [_run("b", [start[s]] * 4, seed=s) for s in start]
    mine = [_run("a", [start[s] + extra[s]] * 4, seed=s, bits=4) for s in reversed(start)]
    paired = _compare(mine, base)
    assert paired.noise == pytest.approx(4.303 * 0.001 / 3**0.5)
    assert paired.verdict == f"worse by 0.0200 ({0.02 / (4.303 * 0.001 / 3**0.5):.1f} times the noise)"
    # The same values from other seeds: Welch's interval, far wider.
    others = [_run("a", run.scalars[VALIDATION_LOSS], seed=9 + i, bits=4) for i, run in enumerate(mine)]
    welch = _compare(others, base)
    # Spreads of 0.5 and 0.502 have almost 4 degrees of freedom, which count as 3: t(0.975, 3) = 3.182.
    assert welch.noise == pytest.approx(3.182 * (2 * 0.25 / 3) ** 0.5, rel=0.01)
    assert welch.verdict == "no difference beyond noise"


def test_several_seeds_against_one() -> None:
    base = [_run("b", [value] * 4, seed=i) for i, value in enumerate((2.0, 2.1, 2.2))]
    one = _compare([_run("a", [2.2] * 4, seed=7, bits=4)], base)
    assert one.noise == pytest.approx(4.303 * 0.1 * (4 / 3) ** 0.5)
    assert "one seed" in one.derived


def test_two_seeds_are_too_few() -> None:
    base = [_run("b", [2.0] * 4, seed=s) for s in (1, 2)]
    mine = [_run("a", [2.02 + 0.03 * s] * 4, seed=s, bits=4) for s in (1, 2)]
    assert _compare(mine, base).verdict == TOO_FEW_SEEDS


def test_false_alarms_are_as_rare_as_the_interval_says() -> None:
    # Independent noise, no difference: 5 % of 2000 verdicts should find one; six standard deviations are 2.9 %.
    rng = random.Random(1)
    alarms = 0
    for _ in range(2000):
        mine, base = ([_run(n, [2 + rng.gauss(0, 0.1)] * 4, seed=s) for s in range(4)] for n in "ab")
        alarms += abs((figures := _compare(mine, base)).difference or 0) > (figures.noise or 0)
    assert alarms / 2000 == pytest.approx(0.05, abs=0.029)


def test_arms() -> None:
    runs = [
        _run("off1", FLAT, seed=1, save="x"),
        _run("four1", FLAT, seed=1, bits=4),
        _run("off2", FLAT, seed=2, save="y"),  # where checkpoints lie makes no other arm
        _run("again", FLAT, seed=1),  # not another seed of the first arm
        _run("lr", FLAT, seed=3, lr=1.0),
        Run("unknown", {LOSS: {1: 1.0}}),
        Run("unknown too", {LOSS: {1: 1.0}}),
    ]
    groups = [[run.name for run in arm.runs] for arm in arms(runs)]
    assert groups == [["off1", "off2"], ["four1"], ["again"], ["lr"], ["unknown"], ["unknown too"]]
    assert arms(runs)[0].name == "off1 (2 seeds)"


def test_other_data_and_lengths_are_said() -> None:
    base = _run("b", FLAT, split="98,2,0", lr=1.0)
    mine = _run("a", [3.0] * 6, split="90,10,0", lr=2.0, bits=4)
    figures = _compare([mine], [base])
    assert (figures.iteration, figures.difference) == (60, 1.0)
    assert figures.verdict == "not judged: trained on other data"
    different = " / ".join(notes_on_pair(Arm("a", (mine,)), Arm("b", (base,))))
    assert "compared up to iteration 60" in different
    assert "other data than the baseline (split)" in different
    assert "not only in LoCo: lr" in different
    # The corpus counts by its content, not by where it lies.
    here, there = (Run(n, base.scalars, {"seed": 1, "data-path": n}, corpus="0" * 64) for n in "ab")
    assert notes_on_pair(Arm("a", (here,)), Arm("b", (there,))) == []
    assert len(arms([here, Run("c", base.scalars, {"seed": 2, "data-path": "c"}, corpus="1" * 64)])) == 2


def test_unfinished() -> None:
    run = _run("a", FLAT, **{"train-iters": 100})
    assert notes_on_run(run) == ["unfinished: its log ends at iteration 80 of 100"]
    # Every 30 iterations a line: nothing is missing after 80 of 100.
    assert notes_on_run(_run("a", FLAT, **{"train-iters": 100, "tensorboard-log-interval": 30})) == []


def test_step_times() -> None:
    fast = _run("a", FLAT, bits=4, times=[9.0, 9.0, 0.9, 1.0, 1.1, 0.9, 1.0, 1.1])
    fast.scalars[EXACT_STEPS] = {10: 10.0, 20: 10.0, **dict.fromkeys(range(30, 90, 10), 0.0)}
    slow = _run("b", FLAT, times=[9.0, 9.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    assert (fast.warm_up, slow.warm_up) == (20, 10)
    both = arms([fast, slow])
    mine, base = judge(both, both[1])
    assert base.steps is not None
    assert base.steps.count == 6  # the warm-up of the one is left out of the other too
    assert mine.speed_up == pytest.approx((2.0, 2 / 1.075, 2 / 0.925))  # quartiles of 0.9 0.9 1 1 1.1 1.1
    assert mine.speed == "2.00 times the speed; one run each: other load is not ruled out"
    # A second run on one side is what shows that; the slower side is named as such.
    again = arms([fast, slow, _run("b", FLAT, seed=2, times=[2.0] * 8)])
    assert judge(again, again[1])[0].speed == "faster: 2.00 times the speed"
    assert judge(again, again[0])[1].speed == "slower: 0.50 times the speed"


def test_a_busy_machine_is_no_speed_up() -> None:
    # Two runs of each arm; one of the baseline's was disturbed. Quartiles alone could miss a run, its median does not.
    quick, disturbed = [1.0] * 40, [2.0] * 12
    base = arms([_run("b", FLAT, seed=1, times=disturbed), _run("b", FLAT, seed=2, times=quick)])
    mine = arms([_run("a", FLAT, seed=s, bits=4, times=quick) for s in (1, 2)])
    steps = step_times(base[0], 0)
    assert steps is not None
    assert (steps.low, steps.high) == (1.0, 2.0)
    lucky = step_times(Arm("c", (_run("c", FLAT, times=[0.5] * 12), _run("c", FLAT, times=quick))), 0)
    assert lucky is not None
    assert (lucky.low, lucky.high) == (0.5, 1.0)
    verdict = judge([*mine, *base], base[0])[0]
    assert verdict.speed == "no difference beyond the spread"
    few = arms([_run("a", FLAT, bits=4, times=[1.0] * 5), _run("b", FLAT, times=[2.0] * 5)])
    assert judge(few, few[1])[0].speed == TOO_FEW


def test_means_are_over_the_seeds() -> None:
    values = (1.0, 1.2, 1.7)
    mine = [_run("a", [v] * 4, seed=i, bits=4) for i, v in enumerate(values)]
    figures = _compare(mine, [_run("b", [1.0] * 4, seed=i) for i in range(3)])
    assert figures.value == pytest.approx(mean(values))
    assert figures.noise == pytest.approx(4.303 * stdev(values) / 3**0.5)
