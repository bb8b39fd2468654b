"""Which reductions count: those whose gradients reach the weights.

A reduction advances the step counter of its bucket and moves what it did not send into the stored error. If the
gradients are then thrown away, both must be taken back (:meth:`megatron_loco.collectives.state.BucketState.discard`).
Megatron throws a step away when

* the optimizer finds Inf or NaN (loss scaling) or a gradient norm above ``grad_norm_skip_threshold``;
* its rerun machine repeats the forward and backward pass, or ends the job instead of stepping;
* a MoE layer ran out of the memory it had reserved (``--moe-paged-stash``) and the pass is repeated.

All decisions are the same on every rank of a data-parallel group, because step counters must be. Megatron reduces the
rerun and stash flags over the world, and Inf and NaN over all ranks of an optimizer instance. Only the comparison with
``grad_norm_skip_threshold`` is a rank's own (a rank that owns no parameters does not make it), so it is reduced here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from megatron_loco.collectives.state import BucketState
from megatron_loco.config import LoCoConfig
from megatron_loco.integrations.megatron.optimizers import leaf_optimizers, states_of


def wrap_optimizer_step(active: Callable[[], LoCoConfig | None], stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of ``step`` of an optimizer class.

    Args:
        active: Returns the settings, or ``None`` where LoCo is off; equal on all ranks.
        stock: The original; returns ``(whether it updated, gradient norm, number of zeros)``.
    """

    def step(optimizer: Any) -> Any:
        result = stock(optimizer)
        if active() is not None:
            if _is_thrown_away(optimizer, not result[0]):
                discard(states_of(optimizer))
            else:
                for state in states_of(optimizer):
                    state.keep()
        return result

    return step


def wrap_should_run_forward_backward(states: Iterable[BucketState], stock: Callable[..., bool]) -> Callable[..., bool]:
    """Return the replacement of ``RerunStateMachine.should_run_forward_backward``."""

    def should_run_forward_backward(machine: Any, data_iterator: Any) -> bool:
        from megatron.core.rerun_state_machine import RerunState

        # From any other state the pass that comes is the first of its iteration in this process.
        has_run = machine.state == RerunState.INITIAL_RUN
        runs = stock(machine, data_iterator)
        if runs and has_run:
            discard(states)
        return runs

    return should_run_forward_backward


def wrap_should_checkpoint_and_exit(
    states: Iterable[BucketState], stock: Callable[..., tuple[bool, bool, int]]
) -> Callable[..., tuple[bool, bool, int]]:
    """Return the replacement of ``RerunStateMachine.should_checkpoint_and_exit``.

    A checkpoint that Megatron then writes has the weights from before the iteration; to resume it is to repeat it.
    """

    def should_checkpoint_and_exit(machine: Any) -> tuple[bool, bool, int]:
        result = stock(machine)
        if result[1]:
            discard(states)
        return result

    return should_checkpoint_and_exit


def wrap_prepare_for_rerun(states: Iterable[BucketState], stock: Callable[..., None]) -> Callable[..., None]:
    """Return the replacement of ``PagedStashRunner.prepare_for_rerun``."""

    def prepare_for_rerun(runner: Any, is_training: bool = True) -> None:
        stock(runner, is_training=is_training)
        if is_training:
            discard(states)

    return prepare_for_rerun


def discard(states: Iterable[BucketState]) -> None:
    """Take back the last reduction of each state, unless its gradients have reached the weights."""
    for state in states:
        state.discard()


def _is_thrown_away(optimizer: Any, is_skipped: bool) -> bool:
    leaves = leaf_optimizers(optimizer)
    # Since 0.18.
    thresholds = [getattr(leaf.config, "grad_norm_skip_threshold", math.inf) for leaf in leaves]
    if not any(map(math.isfinite, thresholds)):
        return is_skipped
    skipped = torch.tensor(float(is_skipped), device=torch.cuda.current_device())
    for group in dict.fromkeys(leaf.get_grad_stats_parallel_group() for leaf in leaves):
        dist.all_reduce(skipped, op=dist.ReduceOp.MAX, group=group)
    return bool(skipped.item())
