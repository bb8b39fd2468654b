"""Steps that are thrown away: skipped by the optimizer or repeated by the rerun machine, they leave no trace."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loco.config import LoCoConfig
from tests._ranks import RankPool, run_ranks
from tests.integrations.megatron._ddp import parallel_megatron, shards
from tests.integrations.megatron._steps import Outcome, Poison, Setup, Training, same, same_snapshot, settings

NUM_STEPS = 6
THROWN_AWAY = 2
"""Index of the step that is skipped or repeated, after two that leave an error."""


@pytest.fixture
def two() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def _all_true(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result
        assert all(result.values()), [name for name, value in result.items() if not value]


def _poison(rank: int, value: float, parameter: int = 0) -> Poison | None:
    def poison(coefficients: list[Tensor]) -> None:
        coefficients[parameter].view(-1)[0] = value

    return poison if rank == 1 else None


def _without_it(setup: Setup, config: LoCoConfig, rank: int) -> tuple[list[Outcome], Training]:
    # The run in which the step never happened; with the rollback "zero" its error is zeroed in its place.
    training = Training(setup, rank)
    outcomes = []
    for seed in range(NUM_STEPS):
        if seed != THROWN_AWAY:
            outcomes.append(training.step(seed))
        elif config.rollback == "zero":
            training.forget()
    return outcomes, training


def _skip(setup: Setup, config: LoCoConfig, rank: int, value: float) -> dict[str, bool]:
    from megatron_loco.integrations.megatron import patch

    result = {}
    with patch(config):
        training = Training(setup, rank)
        outcomes = []
        for seed in range(NUM_STEPS):
            before = training.snapshot()
            weights = [w.clone() for w in training.ddp.module.weights]
            if seed == THROWN_AWAY:
                training.set_scale(2 * training.scale)  # as when it has grown too far
            outcome = training.step(seed, poison=_poison(rank, value) if seed == THROWN_AWAY else None)
            if seed != THROWN_AWAY:
                outcomes.append(outcome)
                result[f"step {seed} updates"] = outcome.updated
                continue
            result["skipped"] = not outcome.updated and same(weights, outcome.weights)
            result["loss scale backs off"] = training.scale == outcome.scale / 2
            result["finite"] = all(e.isfinite().all() for e in training.errors())
            if config.rollback == "restore":
                result["restored"] = same_snapshot(training.snapshot(), before)
            else:
                result["zeroed"] = not any(e.any() for e in training.errors())
                result["counter"] = [s.step for s in training.states] == [step for step, *_ in before]
        reference, other = _without_it(setup, config, rank)
        for step, (mine, theirs) in enumerate(zip(outcomes, reference, strict=True)):
            result[f"shards {step}"] = same(mine.shards, theirs.shards)
            result[f"weights {step}"] = same(mine.weights, theirs.weights)
        result["errors"] = same(training.errors(), other.errors())
        result["something was sent late"] = any(e.any() for e in training.errors())
    return result


def _skips(group: dist.ProcessGroup, cases: list[tuple[Setup, LoCoConfig, float]]) -> dict[str, bool]:
    result = {}
    with ExitStack() as stack:
        parallel_megatron(stack)
        for setup, config, value in cases:
            case = f"{value} {config} {setup}: "
            result |= {case + name: ok for name, ok in _skip(setup, config, group.rank(), value).items()}
    return result


@pytest.mark.kind(1, 3)
def test_inf_or_nan_on_one_rank_leaves_no_trace(two: RankPool) -> None:
    rollbacks = ("restore", "zero")
    # Step 3 of a warm-up-free run with a reset every third step is a reset: it is due again after the skip.
    cases = [
        *((Setup(), settings(rollback=r), v) for r, v in itertools.product(rollbacks, (math.inf, -math.inf, math.nan))),
        *((Setup(overlap=True), settings(rollback=r, reset_interval=3), math.inf) for r in rollbacks),
        *((Setup(num_micro_batches=3), settings(rollback=r, error_bits=32), math.nan) for r in rollbacks),
        *((Setup(average=True), settings(rollback=r, error_bits=16), math.nan) for r in rollbacks),
        *((Setup(grad_reduce_in_fp32=False), settings(rollback=r, bits=8), math.inf) for r in rollbacks),
    ]
    _all_true(two.run(_skips, 2, cases))


def _fixed_scale(group: dist.ProcessGroup) -> dict[str, bool]:
    with ExitStack() as stack:
        parallel_megatron(stack)
        config = settings(rollback="restore", scale_mode="fixed", fixed_inverse_scale=64.0)
        return _skip(Setup(), config, group.rank(), math.inf)


def test_with_a_fixed_scale_too(two: RankPool) -> None:
    _all_true(two.run(_fixed_scale, 2))


def _skipped_in_the_warm_up(group: dist.ProcessGroup) -> dict[str, Any]:
    from megatron_loco.integrations.megatron import patch

    result = {}
    with ExitStack() as stack:
        parallel_megatron(stack)
        stack.enter_context(patch(settings(warmup_steps=2)))
        training = Training(Setup(), group.rank())
        exact = []
        for seed in range(5):
            training.step(seed, poison=_poison(group.rank(), math.inf) if seed in (0, 1) else None)
            exact.append(training.states[0].traffic.exact_steps)
            result[f"unit {seed}"] = float(training.states[0].unit) == 2.0 ** (12 - min(seed, 2))
        # Two skipped, two that count, then compressed.
        result["exact"] = exact == [1, 2, 3, 4, 4]
    return result


def test_skipped_steps_do_not_use_up_the_warm_up(two: RankPool) -> None:
    _all_true(two.run(_skipped_in_the_warm_up, 2))


def _only_in_the_sum(group: dist.ProcessGroup) -> dict[str, Any]:
    """A gradient that is finite everywhere, and overflows once the error is added."""
    from megatron_loco.integrations.megatron import patch

    result = {}
    largest = torch.finfo(torch.float32).max
    with ExitStack() as stack:
        parallel_megatron(stack)
        stack.enter_context(patch(settings(beta=0.0)))
        training = Training(Setup(average=True), group.rank())

        def reduce(second: float) -> Outcome:
            training.backward(0)
            if group.rank() == 1:
                block = training.ddp.module.weights[0].main_grad.view(-1)[:32]
                block[:] = 0.0
                block[0], block[1] = 0.99 * largest, second * largest
            training.ddp.finish_grad_sync()
            return training.update()

        # With codes of 7 at 0.99 the step is 0.1414: 0.9 becomes 6 steps, and 0.0514 stay behind.
        result["first"] = reduce(0.9).updated
        result["error"] = group.rank() == 0 or bool(training.errors()[0].max() * training.scale > 0.05 * largest)
        result["second"] = not reduce(0.97).updated
        result["zeroed"] = not training.errors()[0].any()
        result["again"] = reduce(0.97).updated
    return result


@pytest.mark.kind(1)
def test_an_overflow_of_gradient_plus_error_is_a_skip_on_all_ranks(two: RankPool) -> None:
    _all_true(two.run(_only_in_the_sum, 2))


def _experts(rank: int, world_size: int) -> dict[str, bool]:
    result = {}
    with ExitStack() as stack:
        parallel_megatron(stack, expert_parallel=2)
        # 2 is a parameter of experts, 0 a dense one: each has an optimizer of its own, and a step is skipped by both.
        for parameter, overlap in ((2, False), (0, True)):
            from megatron_loco.integrations.megatron import patch

            with patch(settings(rollback="restore")):
                training = Training(Setup(expert=True, overlap=overlap), rank)
                result["two optimizers"] = len(training.optimizer.chained_optimizers) == 2
                training.step(0)
                before = training.snapshot()
                result[f"{parameter} two kinds"] = len(before) == 2
                outcome = training.step(1, poison=_poison(rank, math.nan, parameter))
                result[f"{parameter} skipped"] = not outcome.updated
                result[f"{parameter} restored"] = same_snapshot(training.snapshot(), before)
                result[f"{parameter} goes on"] = training.step(2).updated
                # Each optimizer lowers its own scale, but Megatron multiplies all gradients by that of the first.
                scale = 2.0**11 if parameter == 0 else 2.0**12
                result[f"{parameter} unit"] = [float(s.unit) for s in training.states] == [scale, scale]
                result[f"{parameter} counts"] = [s.step for s in training.states] == [2, 2]
    return result


@pytest.mark.kind(1)
def test_dense_and_expert_states_are_skipped_together() -> None:
    _all_true(run_ranks(_experts, 4))


def _threshold(group: dist.ProcessGroup) -> dict[str, Any]:
    """A rank that owns only padding does not compare the norm, and must come to the same decision.

    Only with the parameter gather overlapped does stock Megatron get that far: else that rank waits in the gather.
    """
    from megatron_loco.integrations.megatron import patch

    result = {}
    with ExitStack() as stack:
        parallel_megatron(stack)
        for shapes, overlap in ((((40, 40),), False), (((10, 3),), True)):
            with patch(settings(rollback="restore")):
                setup = Setup(
                    fp16=False, skip_threshold=10.0, shapes=shapes, overlap=overlap, overlap_param_gather=overlap
                )
                training = Training(setup, group.rank())
                training.step(0)
                before = training.snapshot()
                training.backward(1, factor=1e4)
                training.ddp.finish_grad_sync()
                updated = training.update().updated
                owns_something = bool(training.optimizer.get_parameters())
                result[f"{shapes} stock"] = updated != owns_something
                result[f"{shapes} restored"] = same_snapshot(training.snapshot(), before)
                result[f"{shapes} goes on"] = training.step(2).updated and training.states[0].step == 2
                result[f"{shapes} all own something"] = overlap or owns_something
                result[f"{shapes} one rank owns nothing"] = not overlap or owns_something == (group.rank() == 0)
    return result


@pytest.mark.kind(1)
def test_a_gradient_norm_above_the_threshold_is_a_skip_on_all_ranks(two: RankPool) -> None:
    _all_true(two.run(_threshold, 2))


def _not_mine(group: dist.ProcessGroup) -> dict[str, Any]:
    """Models and steps that a skip has nothing to do with."""
    from megatron_loco.integrations.megatron import patch

    result = {}
    with ExitStack() as stack:
        parallel_megatron(stack)
        stack.enter_context(patch(settings()))
        one, other = Training(Setup(), group.rank()), Training(Setup(), group.rank())
        one.step(0)
        other.step(0)
        other.backward(1)
        other.ddp.finish_grad_sync()
        reduced = other.snapshot()
        one.step(1, poison=_poison(group.rank(), math.inf))
        result["other model, reduced but not stepped"] = same_snapshot(other.snapshot(), reduced)
        result["one model"] = not one.errors()[0].any() and one.states[0].step == 1
        other.update()

        one.step(2)
        kept = one.snapshot()
        for state in one.states:
            state.discard()
        result["a step that was made is final"] = same_snapshot(one.snapshot(), kept)

        # Reduced for an optimizer that is not Megatron's: nobody says that it was made.
        one.backward(3)
        one.ddp.finish_grad_sync()
        reduced = one.snapshot()
        one.ddp.force_all_reduce = True
        one.backward(4, poison=_poison(group.rank(), math.inf))
        one.ddp.finish_grad_sync(force_all_reduce=True)
        one.ddp.force_all_reduce = False
        result["skipped all-reduce"] = not one.update().updated and same_snapshot(one.snapshot(), reduced)
    return result


def test_a_skip_touches_no_other_step_and_no_other_model(two: RankPool) -> None:
    _all_true(two.run(_not_mine, 2))


def _machine(mode: str) -> Any:
    from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

    machine = RerunStateMachine(mode=RerunMode(mode))
    machine.should_checkpoint_and_exit()  # not in the first iteration, which is never validated
    return machine


def _rerun(group: dist.ProcessGroup, setup: Setup, config: LoCoConfig) -> dict[str, bool]:
    from megatron_loco.integrations.megatron import patch

    result = {}
    rank = group.rank()
    with ExitStack() as stack:
        parallel_megatron(stack)
        stack.enter_context(patch(config))
        training, machine = Training(setup, rank), _machine("validate_results")
        passes = []
        shards_of = []
        for seed in range(NUM_STEPS):
            passes.append(0)
            while machine.should_run_forward_backward(None):
                passes[-1] += 1
                training.backward(seed)
                # One rank alone is not satisfied.
                machine.validate_result(
                    torch.tensor(1.0),
                    rejection_func=lambda _, bad=seed == THROWN_AWAY and rank == 1: bad,
                    message="loss",
                    fatal=False,
                )
                training.ddp.finish_grad_sync()
            result[f"exit {seed}"] = machine.should_checkpoint_and_exit() == (False, False, 0)
            shards_of.append(training.update())
        result["passes"] = passes == [1, 1, 2, 1, 1, 1]
        reference = Training(setup, rank)
        for seed, mine in enumerate(shards_of):
            if seed == THROWN_AWAY and config.rollback == "zero":
                reference.forget()
            theirs = reference.step(seed)
            result[f"shards {seed}"] = same(mine.shards, theirs.shards)
            result[f"weights {seed}"] = same(mine.weights, theirs.weights)
        result["states"] = same_snapshot(training.snapshot(), reference.snapshot())
    return result


@pytest.mark.kind(4)
@pytest.mark.parametrize("rollback", ["restore", "zero"])
def test_a_repeated_step_counts_once(two: RankPool, rollback: str) -> None:
    _all_true(two.run(_rerun, 2, Setup(), settings(rollback=rollback)))
    _all_true(two.run(_rerun, 2, Setup(fp16=False, overlap=True), settings(rollback=rollback, reset_interval=3)))


def _ending(group: dist.ProcessGroup) -> dict[str, Any]:
    """The job ends instead of stepping: what a checkpoint would hold then."""
    from megatron_loco.integrations.megatron import patch

    result = {}
    with ExitStack() as stack:
        parallel_megatron(stack)
        # Megatron saves where the repetition gives the same again, and resumes on another GPU; else it only ends.
        for rollback, again, expected in (
            ("restore", 1.0, (True, True, 16)),
            ("zero", 1.0, (True, True, 16)),
            ("restore", 2.0, (False, True, 17)),
        ):
            with patch(settings(rollback=rollback)):
                training, machine = Training(Setup(), group.rank()), _machine("validate_results")
                training.step(0)
                training.step(1)
                before = training.snapshot()
                values = iter((1.0, again))
                while machine.should_run_forward_backward(None):
                    training.backward(2)
                    value = torch.tensor(next(values))
                    machine.validate_result(value, rejection_func=lambda _: group.rank() == 1, message="loss")
                    training.ddp.finish_grad_sync()
                case = f"{rollback} {again} "
                result[case + "reduced"] = training.states[0].step == 3
                result[case + "ends"] = machine.should_checkpoint_and_exit() == expected
                if rollback == "restore":
                    result[case + "saved"] = same_snapshot(training.snapshot(), before)
                else:
                    result[case + "saved"] = training.states[0].step == 2 and not training.errors()[0].any()
                if expected[0]:
                    # The resumed job: the same machine state, one pass, and no step is taken back at its start.
                    saved = training.snapshot()
                    result[case + "first pass"] = machine.should_run_forward_backward(None)
                    result[case + "untouched"] = same_snapshot(training.snapshot(), saved)
    return result


@pytest.mark.kind(4)
def test_a_job_that_ends_for_a_rerun_saves_the_error_from_before_the_step(two: RankPool) -> None:
    _all_true(two.run(_ending, 2))


def _stash(group: dist.ProcessGroup) -> dict[str, Any]:
    from megatron.core.transformer.moe.paged_stash import PagedStashRunner

    from megatron_loco.integrations.megatron import patch

    result = {}
    with ExitStack() as stack:
        parallel_megatron(stack)
        runner = mock.MagicMock(moe_layers=[], copy_main_params=False)
        stack.enter_context(patch(settings(rollback="restore")))
        training = Training(Setup(), group.rank())
        runner.model, runner.optimizer = [training.ddp], training.optimizer
        training.step(0)
        before = training.snapshot()
        training.backward(1)
        training.ddp.finish_grad_sync()
        reduced = training.snapshot()
        PagedStashRunner.prepare_for_rerun(runner, is_training=False)
        result["validation"] = same_snapshot(training.snapshot(), reduced)
        PagedStashRunner.prepare_for_rerun(runner, is_training=True)
        result["training"] = same_snapshot(training.snapshot(), before)
        result["then"] = training.step(1).updated and same_snapshot(training.snapshot(), reduced)
    return result


def test_a_pass_repeated_for_lack_of_stash_memory_counts_once(two: RankPool) -> None:
    _all_true(two.run(_stash, 2))


def _second_finish(rank: int, world_size: int) -> dict[str, Any]:
    from megatron_loco.integrations.megatron import grad_sync, patch

    result: dict[str, Any] = {}
    with ExitStack() as stack:
        parallel_megatron(stack)
        for overlap, micro_batches in itertools.product((False, True), (1, 3)):
            setup = Setup(overlap=overlap, num_micro_batches=micro_batches)
            case = f"overlap {overlap}, {micro_batches} micro-batches: "
            with patch(settings()):
                training, reference = Training(setup, rank), Training(setup, rank)
                expected = [reference.step(seed) for seed in range(3)]
                num_buckets = len(training.states)
                result[case + "buckets"] = num_buckets == (world_size > 1)
                with mock.patch.object(grad_sync, "reduce_scatter", wraps=grad_sync.reduce_scatter) as hook:
                    for seed in range(3):
                        hook.reset_mock()
                        training.backward(seed)
                        training.ddp.finish_grad_sync()
                        reduced = shards(training.ddp)
                        try:
                            training.ddp.finish_grad_sync()
                            refused = False
                        except RuntimeError as error:
                            refused = "zero_grad_buffer()" in str(error)
                        # With overlap stock takes a second finish for the end of the same reduction.
                        result[case + f"refused {seed}"] = refused == (not overlap and world_size > 1)
                        result[case + f"hook calls {seed}"] = hook.call_count == num_buckets
                        if world_size > 1:
                            result[case + f"unharmed {seed}"] = same(shards(training.ddp), reduced)
                            result[case + f"shards {seed}"] = same(training.update().shards, expected[seed].shards)
                        with torch.no_grad():  # as an evaluation between steps
                            training.ddp(training.coefficients(seed))
                    hook.reset_mock()
                    training.ddp.force_all_reduce = True
                    training.backward(3)
                    training.ddp.finish_grad_sync(force_all_reduce=True)
                    training.ddp.force_all_reduce = False
                    result[case + "all-reduce"] = hook.call_count == 0
    return result


@pytest.mark.kind(13)
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_are_reduced_once_per_step(world_size: int) -> None:
    _all_true(run_ranks(_second_finish, world_size))
