"""The gradient reduce-scatter of Megatron's distributed data parallelism, replaced per bucket.

How stock works (``megatron/core/distributed/param_and_grad_buffer.py``): ``_ParamAndGradBucketGroup.start_grad_sync``
scales the local gradients and calls the module global ``dist_reduce_scatter_func(shard, bucket.grad_data, op=, group=,
async_op=)`` per bucket, inside a coalescing manager whose ``wait`` becomes the group's handle.

What is changed: the global becomes a dispatcher that looks only at the bucket group that is being started *now*. A
bucket with a LoCo state goes through :func:`megatron_loco.collectives.reduce_scatter.reduce_scatter`; every other call
reaches the stock function unchanged. The coalescing manager does not know our asynchronous work (it would wait for
nothing), so the group's handle is extended by it. Scaling, reduce op, gradient accumulation, NaN checks and all
bookkeeping stay stock.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_loco import __version__
from megatron_loco.collectives.agreement import check_agreement
from megatron_loco.collectives.reduce_scatter import reduce_scatter
from megatron_loco.collectives.scratch import ScratchPool
from megatron_loco.collectives.state import BucketState
from megatron_loco.collectives.work import Work
from megatron_loco.config import LoCoConfig, flag
from megatron_loco.core.wire import ParamSpan, bucket_layout

logger = logging.getLogger(__name__)


@dataclass
class _Dispatch:
    # One start_grad_sync in progress: which of its buckets have a state, and the works that it started.
    states: list[tuple[Any, BucketState]]
    works: list[Any] = field(default_factory=list)

    def state_of(self, grad_data: torch.Tensor) -> BucketState | None:
        # By tensor object, not by address: Megatron may free and restore the storage behind it.
        return next((state for bucket, state in self.states if bucket.grad_data is grad_data), None)


class _GroupWork:
    # The handle of a bucket group: what stock waits for, then ours, in the order of dispatch.
    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        while self._works:
            self._works.pop(0).wait()


class GradSync:
    """LoCo states of all bucket groups of a job, and the wrappers around Megatron's functions."""

    def __init__(self) -> None:
        self.states: list[BucketState] = []
        self._scratch: dict[torch.device, ScratchPool] = {}
        self._in_progress = threading.local()

    def attach(self, ddp: Any, config: LoCoConfig) -> None:
        """Give every bucket of a ``DistributedDataParallel`` model that is reduced over several ranks a LoCo state.

        Args:
            ddp: ``megatron.core.distributed.DistributedDataParallel``, fully constructed.
            config: Settings, equal on all ranks.

        Raises:
            ValueError: the model's ``ddp_config`` has a combination that LoCo does not handle, or the ranks of a group
                differ in version, settings or buckets.
        """
        _check_ddp_config(ddp.ddp_config)
        num_skipped = 0
        first = len(self.states)
        for kind, bucket_groups in (("dense", ddp.bucket_groups), ("expert", ddp.expert_parallel_bucket_groups)):
            previous = None
            of_kind = len(self.states)
            for bucket_group in bucket_groups:
                group = bucket_group.intra_distributed_optimizer_instance_group
                if group.size() == 1:
                    num_skipped += len(bucket_group.buckets)
                    continue
                bucket_group.loco_states = [
                    (bucket, self._bucket_state(f"{kind} bucket {bucket.bucket_id}", bucket, group.size(), config))
                    for bucket in bucket_group.buckets
                ]
                self.states += [state for _, state in bucket_group.loco_states]
                if ddp.ddp_config.overlap_grad_reduce:
                    # As stock does for its own all-to-all: finish the predecessor before starting the next, so that the
                    # scratch memory of two groups is in flight at most.
                    bucket_group.previous_grad_reduce_bucket_group = previous
                previous = bucket_group
            if previous is not None:
                # One group for all buckets of a kind.
                group = previous.intra_distributed_optimizer_instance_group
                check_agreement(_facts(config, self.states[of_kind:]), group)
        self._report(self.states[first:], num_skipped, config)

    def dispatcher(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement of ``param_and_grad_buffer.dist_reduce_scatter_func``."""

        def dist_reduce_scatter_func(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            dispatch = self._current()
            state = dispatch.state_of(input) if dispatch else None
            if dispatch is None or state is None:
                return stock(output, input, *args, **kwargs)
            work = reduce_scatter(output, input, state, exact=stock, **kwargs)
            # An exact reduction returns what the coalescing manager gives it; the manager waits for that one itself.
            if isinstance(work, Work):
                dispatch.works.append(work)
            return work

        return dist_reduce_scatter_func

    def wrap_start_grad_sync(self, stock: Callable[..., None]) -> Callable[..., None]:
        """Return the replacement of ``_ParamAndGradBucketGroup.start_grad_sync``."""

        def start_grad_sync(bucket_group: Any, force_all_reduce: bool | None = False) -> None:
            states = getattr(bucket_group, "loco_states", None)
            if states is None:
                return stock(bucket_group, force_all_reduce=force_all_reduce)
            with self._dispatching(_Dispatch(states)) as dispatch:
                stock(bucket_group, force_all_reduce=force_all_reduce)
            if force_all_reduce:
                for _, state in states:
                    state.count_all_reduce()
            if dispatch.works:
                bucket_group.grad_reduce_handle = _GroupWork([bucket_group.grad_reduce_handle, *dispatch.works])
            return None

        return start_grad_sync

    def _bucket_state(self, name: str, bucket: Any, world_size: int, config: LoCoConfig) -> BucketState:
        grad_data = bucket.grad_data
        layout = bucket_layout(
            grad_data.numel(),
            world_size,
            [
                # Norm weights and biases: few elements, most of the harm of quantisation.
                ParamSpan(start, stop, exact=config.is_identity or param.dim() < 2)
                for param, (start, stop) in bucket.param_to_index.items()
            ],
            bits=config.bits,
            block_size=config.block_size,
            exact_itemsize=grad_data.element_size(),
        )
        device = grad_data.device
        scratch = self._scratch.setdefault(device, ScratchPool(device))
        return BucketState(name, layout, config, device, scratch)

    def _current(self) -> _Dispatch | None:
        stack = getattr(self._in_progress, "stack", None)
        return stack[-1] if stack else None

    @contextmanager
    def _dispatching(self, dispatch: _Dispatch) -> Iterator[_Dispatch]:
        # A stack: starting one group may first finish, and in the first batch start, its predecessor.
        if not hasattr(self._in_progress, "stack"):
            self._in_progress.stack = []
        self._in_progress.stack.append(dispatch)
        try:
            yield dispatch
        finally:
            self._in_progress.stack.pop()

    @staticmethod
    def _report(states: list[BucketState], num_skipped: int, config: LoCoConfig) -> None:
        if dist.get_rank() != 0:
            return
        if num_skipped:
            logger.info("LoCo: %d bucket(s) belong to one rank alone and are left unchanged", num_skipped)
        if not states:
            logger.warning("LoCo: nothing to compress on rank 0, no bucket is reduced over more than one rank")
            return
        numel = sum(state.layout.numel for state in states)
        wire_bits = sum(state.layout.send_bytes for state in states) * 8 / numel
        error_bytes = sum(state.error.num_bytes for state in states)
        logger.info(
            "LoCo: %d bucket(s), %d gradient elements at %.2f bits each (%s backend), error state %.2f MB "
            "(%.2f bytes per element); the first %d steps are exact",
            len(states),
            numel,
            wire_bits,
            states[0].backend.name,
            error_bytes / 1e6,
            error_bytes / numel,
            config.warmup_steps,
        )


def _facts(config: LoCoConfig, states: list[BucketState]) -> dict[str, object]:
    # What the ranks of a group must have in common. Python's hash of numbers is the same in every process.
    facts: dict[str, object] = {"version of megatron_loco": __version__}
    facts |= {flag(name): value for name, value in dataclasses.asdict(config).items()}
    facts["number of buckets"] = len(states)
    for number, state in enumerate(states):
        facts[f"layout of bucket {number} ({state.name})"] = (state.layout.numel, hash(state.layout))
    return facts


def _check_ddp_config(ddp_config: Any) -> None:
    # Users of megatron.core without Megatron's command line meet these here; the others at argument check.
    if not ddp_config.use_distributed_optimizer:
        raise ValueError("LoCo needs use_distributed_optimizer=True (--use-distributed-optimizer)")
    if ddp_config.num_distributed_optimizer_instances > 1:
        raise ValueError("LoCo does not handle num_distributed_optimizer_instances > 1 yet; set it to 1")
    if ddp_config.reduce_scatter_with_fp32_accumulation:
        raise ValueError("LoCo always sums in fp32: leave reduce_scatter_with_fp32_accumulation off")
