"""Error state and counters in Megatron's distributed checkpoints (``--ckpt-format torch_dist``).

What is saved: every rank's own error of each of its buckets, also on ranks whose optimizer shards are replicas of
others, under keys that name the rank, and a table of counters and checksums. The checkpoint's content metadata gets one
entry ``loco`` (:mod:`.checkpoint_entry`): format, settings, parallel sizes, step, and a digest of the layouts of all
ranks. Which optimizer format Megatron writes does not matter, and a stock run, which asks for none of these keys, loads
the checkpoint as its own.

What is loaded, decided on all ranks alike from that entry:

* The digest is this run's: error, counters and unit, so that the run continues bit for bit. Bits, beta, warm-up and
  reset interval may have changed.
* It is another (other parallel sizes, buckets, blocks, ...), or ``--loco-load-error never``: zero error, and the step
  counter goes on, so that no second warm-up runs. The error of a rank is what is still missing of *its* gradients in
  *its* blocks; another layout has no use for it.
* A checkpoint without the entry (a stock run), or one whose optimizer state is not loaded: zero error and step 0.

Whatever is not taken over is said once, on rank 0. Errors are checked against their checksums on all ranks together.

Two functions are wrapped: every rank calls both, in lockstep, for each such checkpoint. The optimizer's own methods
would be no place for collectives: with experts, ranks differ in how many optimizers they have.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loco.collectives.agreement import group_device
from megatron_loco.collectives.saved_state import damaged, load_counters, save_counters
from megatron_loco.collectives.state import BucketState
from megatron_loco.config import LoCoConfig
from megatron_loco.core.error_feedback import reset_error
from megatron_loco.integrations.megatron.checkpoint_entry import ENTRY, Plan, describe, make_plan
from megatron_loco.integrations.megatron.optimizers import states_of

logger = logging.getLogger(__name__)

_GO_ON = "pass --loco-load-error never to go on with zero error; weights and optimizer state are not concerned"
_MAX_NAMED = 8


class Checkpoints:
    """The wrappers around Megatron's checkpoint functions.

    Args:
        active: Returns the settings, or ``None`` where LoCo is off; equal on all ranks.
        loaded: Called after counters were set by a load.
    """

    def __init__(self, active: Callable[[], LoCoConfig | None], loaded: Callable[[], None] = lambda: None) -> None:
        self._active = active
        self._loaded = loaded
        self._plan: Plan | None = None
        self._announced = False

    def wrap_generate_state_dict(self, stock: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """Return the replacement of ``megatron.training.checkpointing.generate_state_dict``.

        Megatron builds with it what it saves, and, with ``is_loading``, the template of what it loads.
        """
        signature = inspect.signature(stock)

        def generate_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
            state_dict = stock(*args, **kwargs)
            config = self._active()
            bound = signature.bind(*args, **kwargs).arguments
            of_optimizer = bound.get("optim_sd_kwargs") or {}
            metadata = of_optimizer.get("metadata")
            if config is None or metadata is None or bound["args"].ckpt_format != "torch_dist":
                return state_dict
            optimizer = None if bound["args"].no_save_optim else bound["optimizer"]
            if of_optimizer.get("is_loading", False):
                self._plan = make_plan(metadata.get(ENTRY), optimizer, config)
                if self._plan.states and not self._plan.zero_because:
                    # Read in place: a second copy of the error may not fit.
                    state_dict[ENTRY] = _sharded(self._plan.states, _empty_counters(self._plan))
            elif optimizer is not None:
                states = states_of(optimizer)
                metadata[ENTRY] = describe(states, optimizer, config)
                if states and config.save_error == "always":
                    # Megatron's asynchronous writer copies from an accelerator before the save call returns. Memory of
                    # the CPU it shares with this process, and reads later.
                    copy = bound["args"].async_save and states[0].unit.device.type == "cpu"
                    state_dict[ENTRY] = _sharded(states, save_counters(states), copy=copy)
            return state_dict

        return generate_state_dict

    def wrap_load_base_checkpoint(self, stock: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        """Return the replacement of ``megatron.training.checkpointing._load_base_checkpoint``, which reads the file.

        Raises (the replacement):
            ValueError: on every rank, if the error that any rank read is not what was saved.
        """
        signature = inspect.signature(stock)

        def _load_base_checkpoint(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            bound = signature.bind(*args, **kwargs).arguments
            if self._active() is None or bound.get("rank0"):
                # The latter only looks into the checkpoint, before there is a template.
                return stock(*args, **kwargs)
            plan, self._plan = self._plan, None
            try:
                result = stock(*args, **kwargs)
            except BaseException as error:  # torch's CheckpointException is no Exception
                # On this rank alone, as in a stock run: the others may be in a collective of Megatron's.
                if plan is not None and not plan.zero_because:
                    error.add_note(f"LoCo: if what cannot be read is an entry '{ENTRY}.rank_...', {_GO_ON}")
                elif plan is not None and bound["args"].dist_ckpt_strictness == "raise_all":
                    error.add_note(
                        f"LoCo: entries '{ENTRY}.rank_...' are not asked for ({plan.zero_because}), which "
                        "--dist-ckpt-strictness raise_all does not accept"
                    )
                raise
            if result[0] is not None:
                plan = plan or Plan((), zero_because="a checkpoint of this format holds no error state")
                self._take_over(plan, result[0].pop(ENTRY, {}))
            return result

        return _load_base_checkpoint

    def announce(self, config: LoCoConfig | None) -> None:
        """Say at the start, and once, if the checkpoints that this run writes will not hold the error state."""
        if config is None or self._announced:
            return
        try:
            from megatron.training.global_vars import get_args

            args = get_args()
        except (ImportError, AssertionError):  # megatron.core used as a library: its checkpoints are not ours
            return
        if not args.save:
            return
        self._announced = True
        reason = None
        if config.save_error == "never":
            reason = "--loco-save-error never"
        elif args.no_save_optim:
            reason = "--no-save-optim"
        elif args.ckpt_format != "torch_dist":
            reason = f"--ckpt-format {args.ckpt_format}; torch_dist would"
        if reason is not None and dist.get_rank() == 0:
            logger.warning("LoCo: checkpoints of this run do not hold the error state (%s)", reason)

    def _take_over(self, plan: Plan, read: Mapping[str, Tensor]) -> None:
        if plan.zero_because:
            _start_at_zero(plan.states, plan.step)
        else:
            problems = _take_over_error(plan, read) if plan.states else []
            message = _agree_on(problems)
            if message:
                _start_at_zero(plan.states, plan.step)
                raise ValueError(message)
            if plan.states:
                load_counters(plan.states, read["counters"], plan.columns)
        self._loaded()
        config = self._active()
        if dist.get_rank() == 0 and config is not None:
            _report(plan, config)


def _report(plan: Plan, config: LoCoConfig) -> None:
    if plan.zero_because:
        exact = max(0, config.warmup_steps - plan.step)
        logger.warning(
            "LoCo: zero error, and step %d of its own counter%s: %s",
            plan.step,
            f" (the next {exact} steps are exact)" if exact else "",
            plan.zero_because,
        )
        return
    logger.info("LoCo: goes on with the error state of the checkpoint, at step %d", plan.step)
    if plan.changed_settings:
        logger.warning("LoCo: the error state of the checkpoint is from other settings: %s", plan.changed_settings)


def _start_at_zero(states: Sequence[BucketState], step: int) -> None:
    for state in states:
        reset_error(state.error)
        state.resume(step)


def _take_over_error(plan: Plan, read: Mapping[str, Tensor]) -> list[str]:
    for key, tensor in _error_tensors(plan.states).items():
        if read[key].data_ptr() != tensor.data_ptr():  # else it was read in place
            tensor.copy_(read[key].view(tensor.shape))
    return damaged(plan.states, read["counters"], plan.columns)


def _agree_on(problems: Sequence[str]) -> str:
    """Return the same message on every rank, empty if no rank has a problem. A collective over all ranks."""
    everyone = dist.group.WORLD
    assert everyone is not None
    total = torch.tensor(len(problems), dtype=torch.int64, device=group_device(everyone))
    dist.all_reduce(total, group=everyone)
    if not total.item():
        return ""
    held: list[list[str] | None] = [None] * everyone.size()
    dist.all_gather_object(held, list(problems), group=everyone)
    named = [f"rank {rank}: {problem}" for rank, theirs in enumerate(held) for problem in theirs or ()]
    if len(named) > _MAX_NAMED:
        named = [*named[:_MAX_NAMED], f"and {len(named) - _MAX_NAMED} more"]
    return f"LoCo: the error state of the checkpoint is damaged, checksums differ ({', '.join(named)}); {_GO_ON}"


def _empty_counters(plan: Plan) -> Tensor:
    device = plan.states[0].unit.device
    return torch.empty(len(plan.states), len(plan.columns), dtype=torch.int64, device=device)


def _error_tensors(states: Sequence[BucketState]) -> dict[str, Tensor]:
    return {
        f"bucket_{number}.{name}": tensor
        for number, state in enumerate(states)
        for name, tensor in state.error.tensors().items()
        if tensor.numel()
    }


def _sharded(states: Sequence[BucketState], counters: Tensor, *, copy: bool = False) -> dict[str, Any]:
    """This rank's part of a sharded state dict: whole tensors of which no other rank has a part.

    A key per tensor, and not one for all ranks: shapes differ between ranks, and a reader plans for its own keys only.
    """
    from megatron.core.dist_checkpointing import ShardedTensor

    tensors = {"counters": counters, **_error_tensors(states)}
    return {
        key: ShardedTensor.from_rank_offsets(f"{ENTRY}.rank_{dist.get_rank()}.{key}", t.clone() if copy else t)
        for key, t in tensors.items()
    }
