"""LoCo in FSDP2 (``torch.distributed.fsdp.fully_shard``): :func:`apply` replaces how gradients are reduced.

Sharded over one mesh dimension, the reduce-scatter of each unit goes through
:func:`megatron_loco.collectives.reduce_scatter.reduce_scatter`, as torch's ``set_custom_reduce_scatter`` provides.
Hybrid sharding (HSDP) reduces exactly inside a shard group, as before, and what travels between replicas is compressed:
its all-reduce becomes :mod:`megatron_loco.collectives.all_reduce`. Prefetch, overlap, gradient accumulation, mixed
precision and divide factors stay torch's.

Every reduction is one step of the error feedback, of the warm-up and of the reset interval. torch reduces in every
backward pass; with ``model.set_requires_gradient_sync(False)`` in all but the last, a step is an optimizer step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_loco.collectives.all_reduce import padded_numel, start_all_reduce
from megatron_loco.collectives.reduce_scatter import reduce_scatter
from megatron_loco.collectives.state import BucketState
from megatron_loco.config import LoCoConfig
from megatron_loco.core.wire import ParamSpan
from megatron_loco.integrations.pytorch.checkpoint import SavedStates
from megatron_loco.integrations.pytorch.fsdp2_layout import (
    fsdp_units,
    num_gradients,
    param_names,
    shard_spans,
    trainable,
    unit_layout,
)
from megatron_loco.integrations.pytorch.hsdp import MeshInfos, shard_only
from megatron_loco.integrations.pytorch.model_states import GradientScale, ModelStates


def apply(
    model: nn.Module,
    config: LoCoConfig,
    *,
    gradient_scale: GradientScale | None = None,
    gather_dtype: torch.dtype | None = None,
) -> FSDP2Handle:
    """Compress the gradient reduction of every ``fully_shard``-ed module of ``model``.

    Call it on all ranks, after the last ``fully_shard``, before the first backward pass.

    Args:
        model: The root module.
        config: Settings, equal on all ranks.
        gradient_scale: Returns what the gradients are multiplied by at present (fp16 with a gradient scaler).
        gather_dtype: Hybrid sharding only: in what the sums go back to all replicas; default: the dtype of the
            reduction. ``torch.bfloat16`` halves what fp32 sends there, and rounds.

    Returns:
        Its states; keep it for checkpoints.

    Raises:
        ValueError: the model is not sharded, its gradients are reduced in a way of their own already, or ranks
            disagree; nothing is changed then.
        RuntimeError: a collective of a group returns wrong results.
    """
    units = [(name, group, param_names(group, model)) for name, group in fsdp_units(model)]
    for name, group, _ in units:
        _refuse(name, group)
    states = ModelStates(config, gradient_scale, gather_dtype)
    reductions: list[_UnitReduction] = []
    for name, group, names in units:
        is_hybrid = group._is_hsdp
        over = group._all_reduce_process_group if is_hybrid else group._reduce_scatter_process_group
        # torch averages unless it is told a divisor, which may still happen.
        states.settle(over, average=True)
        reductions.append((_BetweenReplicas if is_hybrid else _BetweenShards)(name, group, names, states, over))
    for reduction in reductions:
        reduction.install()
    return FSDP2Handle(states, reductions)


def _refuse(name: str, group: Any) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    if not isinstance(group.mesh_info, FSDPMeshInfo):
        raise ValueError(f"LoCo: {name} is replicated, not sharded; use DistributedDataParallel and megatron_loco.ddp")
    if type(group._reduce_scatter_comm) is not DefaultReduceScatter:
        raise ValueError(
            f"LoCo: the reduce-scatter of {name} is {type(group._reduce_scatter_comm).__name__} already; LoCo needs "
            "torch's default one (no set_custom_reduce_scatter, no process-group or symmetric memory)"
        )
    if group._is_hsdp and group._all_reduce_hook is not None:
        raise ValueError(
            f"LoCo: {name} has an all-reduce hook (set_all_reduce_hook), which LoCo needs in hybrid sharding"
        )


class FSDP2Handle(SavedStates):
    """What :func:`apply` did to a model; a ``Stateful`` of ``torch.distributed.checkpoint``.

    Args:
        model_states: The states.
        reductions: Of the units.
    """

    def __init__(self, model_states: ModelStates, reductions: Sequence[_UnitReduction]) -> None:
        super().__init__(model_states)
        self._reductions = reductions

    def prepare_states(self) -> None:
        """Make the states of all units, which otherwise the first backward pass does."""
        for reduction in self._reductions:
            reduction.current_state()

    def remove(self) -> None:
        """Give the model its stock reduction back."""
        for reduction in self._reductions:
            reduction.uninstall()


class _UnitReduction(ABC):
    # The reduction of one unit over `over`, with a state for the parameters that get gradients at present.
    def __init__(
        self, name: str, group: Any, names: Sequence[str], states: ModelStates, over: dist.ProcessGroup
    ) -> None:
        self.name = name
        self._group = group
        self._names = names
        self._states = states
        self._over = over
        self._made_for: tuple[object, ...] | None = None
        self._state: BucketState | None = None
        self._numel = 0

    @abstractmethod
    def install(self) -> None:
        """Reduce by LoCo."""

    @abstractmethod
    def uninstall(self) -> None:
        """Reduce as torch does."""

    @abstractmethod
    def _layout(self) -> tuple[int, int, list[ParamSpan]]:
        """Elements of what torch hands over, of the bucket that is made of it, and where parameters lie in that."""

    def current_state(self, dtype: torch.dtype | None = None) -> BucketState | None:
        """The state for the parameters that are trainable now; ``None`` where there is nothing to compress."""
        dtype = dtype or self._gradient_dtype()
        key = (trainable(self._group), dtype)
        if key != self._made_for:
            # Parameters were frozen or thawed, on all ranks: the old error belongs to other blocks.
            self._made_for = key
            self._numel, numel, spans = self._layout()
            self._state = None
            if self._over.size() > 1 and num_gradients(self._group) >= max(1, self._states.config.min_bucket_numel):
                self._state = self._states.make(
                    self.name, numel, spans, self._over, dtype, self._group.device, stream=type(self).__name__
                )
            else:
                self._states.remove(self.name)
        return self._state

    def _gradient_dtype(self) -> torch.dtype:
        policy = self._group.mp_policy
        first = self._group.fsdp_params[0].sharded_param.dtype
        dtype = policy.reduce_dtype or policy.param_dtype or first
        assert isinstance(dtype, torch.dtype)
        return dtype

    def _exact_because(self, numel: int) -> str | None:
        # From shapes and settings that all ranks share, or torch's own reduction would fail as well.
        if self._state is None:
            return "it is smaller than min_bucket_numel"
        if numel != self._numel:
            return "not all of its parameters got gradients in this pass (see set_reduce_scatter_unused_params)"
        return None


class _BetweenShards(_UnitReduction):
    # torch's ReduceScatter interface, by its two methods.
    def install(self) -> None:
        self._stock = self._group._reduce_scatter_comm
        self._group._reduce_scatter_comm = self

    def uninstall(self) -> None:
        self._group._reduce_scatter_comm = self._stock

    def _layout(self) -> tuple[int, int, list[ParamSpan]]:
        numel, spans = unit_layout(self._group, self._names, self._over.size(), self._states.config)
        return numel, numel, spans

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is reduced."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Reduce as ``dist.reduce_scatter_tensor`` does; called on the stream of the reduction."""
        state = self.current_state(input_tensor.dtype)
        reason = self._exact_because(input_tensor.numel())
        if state is None or reason is not None:
            self._states.count_exact(
                self.name, str(reason), input_tensor.numel(), self._over, input_tensor.element_size()
            )
            return self._stock(output_tensor, input_tensor, group, op, async_op)
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            # set_gradient_divide_factor on NCCL: multiplied in the collective there.
            input_tensor.div_(self._group.gradient_divide_factor)
            op = dist.ReduceOp.SUM
        return reduce_scatter(
            output_tensor,
            input_tensor,
            state,
            op=op,
            group=group,  # may be a second one of the same ranks (set_separate_reduce_scatter_group)
            async_op=async_op,
            unit=self._states.unit(input_tensor.device),
            node_groups=self._states.node_groups(self._over),
        )


class _BetweenReplicas(_UnitReduction):
    # Between replicas the hook that torch calls with the sums of a shard group; torch's own all-reduce is left out.
    _stock: MeshInfos
    _partial_sums: Tensor | None = None

    def install(self) -> None:
        self._stock = shard_only(self._group)
        self._group._all_reduce_hook = self._reduce_between_replicas

    def uninstall(self) -> None:
        self._stock.restore(self._group)
        self._group._all_reduce_hook = None

    def _layout(self) -> tuple[int, int, list[ParamSpan]]:
        shards = self._group.mesh_info.shard_process_group
        numel, spans = unit_layout(self._group, self._names, shards.size(), self._states.config)
        shard_numel = numel // shards.size()
        padded = padded_numel(shard_numel, self._over.size())
        return shard_numel, padded, shard_spans(spans, numel, shards.size(), shards.rank())

    @torch.no_grad()
    def _reduce_between_replicas(self, sums: Tensor) -> None:
        group = self._group
        if sums.is_cuda:
            sums.record_stream(torch.cuda.current_stream())  # torch frees it on the stream of the reduce-scatter
        # set_requires_all_reduce(False): torch keeps such sums for the pass that has it.
        if not group.all_reduce_grads:
            self._partial_sums = sums.clone() if self._partial_sums is None else self._partial_sums.add_(sums)
            sums.zero_()
            return
        if self._partial_sums is not None:
            sums.add_(self._partial_sums)
            self._partial_sums = None
        # Without a divisor torch averages in both hops; with one, the first hop or the end divides by all of it.
        op = dist.ReduceOp.AVG if group.gradient_divide_factor is None else dist.ReduceOp.SUM
        state = self.current_state(sums.dtype)
        reason = self._exact_because(sums.numel())
        if state is None or reason is not None:
            for _ in range(2):  # an all-reduce has two passes
                self._states.count_exact(self.name, str(reason), sums.numel(), self._over, sums.element_size())
            dist.all_reduce(sums, op=op, group=self._over)
            return
        start_all_reduce(
            sums,
            state,
            op=op,
            group=self._over,
            gather_dtype=self._states.gather_dtype,
            unit=self._states.unit(sums.device),
            node_groups=self._states.node_groups(self._over),
        ).wait()
