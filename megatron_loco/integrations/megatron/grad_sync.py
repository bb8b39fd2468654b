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

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from megatron_loco.collectives.agreement import check_agreement, settings_facts
from megatron_loco.collectives.node_placement import NodePlacement, describe
from megatron_loco.collectives.placement import TWO_LEVEL, Topology, find_nodes
from megatron_loco.collectives.reduce_scatter import reduce_scatter
from megatron_loco.collectives.schedule import chunk_bytes
from megatron_loco.collectives.scratch import ScratchPool, sizes_in_flight
from megatron_loco.collectives.self_check import check_collectives
from megatron_loco.collectives.state import BucketState, Traffic
from megatron_loco.collectives.work import StreamWork, Work
from megatron_loco.config import LoCoConfig
from megatron_loco.core.exchange import plan_exchange, ring_cost
from megatron_loco.core.wire import ParamSpan
from megatron_loco.integrations.megatron import units
from megatron_loco.integrations.megatron.differences import (
    captures_whole_step,
    gradient_spans,
    waits_for_wrong_stream,
)
from megatron_loco.integrations.megatron.startup_report import Attached, num_gradients, report


@dataclass(frozen=True)
class _StockExchange:
    # What stock functions send of one bucket: all of it where the bucket is small, and with several optimizer instances
    # the all-reduce of the shard across them. Nodes of the ranks that do so; none where there is no such reduction.
    bucket: Any
    world_size: int
    small_over: Sequence[int]
    shard_over: Sequence[int]

    def count(self, traffic: Traffic, *, all_reduce: bool = False) -> None:
        numel, itemsize = self.bucket.grad_data.numel(), self.bucket.grad_data.element_size()
        bf16 = torch.bfloat16.itemsize
        if self.small_over:
            cost = ring_cost(numel, self.small_over, itemsize, passes=2 if all_reduce else 1)
            traffic.add_bytes(cost, ring_cost(numel, self.small_over, bf16))
        if self.shard_over:
            shard_numel = numel // self.world_size
            cost = ring_cost(shard_numel, self.shard_over, itemsize, passes=2)
            traffic.add_bytes(cost, ring_cost(shard_numel, self.shard_over, bf16, passes=2))


@dataclass
class _Dispatch:
    # One start_grad_sync in progress: which of its buckets have a state, what of them is left to stock functions, and
    # the works that it started.
    states: list[tuple[Any, BucketState]]
    stock: list[_StockExchange]
    model_config: Any
    works: list[Any] = field(default_factory=list)
    num_reduced: int = 0

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
        self.stock_traffic = Traffic()
        """What stock functions sent for models with LoCo: small buckets, and all-reduces across optimizer instances."""
        self.unit = units.GradientUnit()
        self._placement = NodePlacement()
        self._scratch: dict[tuple[torch.device, Any], ScratchPool] = {}
        self._in_progress = threading.local()
        self._checked: set[tuple[str, bool]] = set()

    def attach(self, ddp: Any, config: LoCoConfig | None) -> None:
        """Give every bucket of a ``DistributedDataParallel`` model that is reduced over several ranks a LoCo state.

        A collective over the data-parallel groups of the model: every rank that constructs it must call, also where
        LoCo is off. No group is larger than that of the buckets, since another pipeline stage may have other models.

        Args:
            ddp: ``megatron.core.distributed.DistributedDataParallel``, fully constructed.
            config: Settings, equal on all ranks; ``None`` where LoCo is off: the ranks are compared, nothing else.

        Raises:
            ValueError: the model has something that LoCo does not handle, or the ranks of a group differ in version,
                settings or buckets.
            RuntimeError: the collectives of a group return wrong results.
        """
        refusal = None if config is None else _refusal(ddp) or units.refusal(ddp, config)
        attached = Attached({param: name for name, param in ddp.module.named_parameters()})
        kinds = [("dense", ddp.bucket_groups, ddp.intra_dp_cp_group)]
        if ddp.expert_parallel_bucket_groups:
            # Else, as on all ranks of the dense group, NCCL would make a communicator that this model never uses.
            kinds.append(("expert", ddp.expert_parallel_bucket_groups, ddp.intra_expt_dp_group))
        facts = settings_facts(config) | {
            "what LoCo refuses": refusal,
            "number of bucket groups of experts": len(ddp.expert_parallel_bucket_groups),
        }
        groups = [group for _, _, group in kinds]
        if ddp.ddp_config.num_distributed_optimizer_instances > 1:
            groups.append(ddp.inter_dist_opt_group)
        for group in groups:
            check_agreement(facts, group)
        if refusal is not None:
            # Only now: a rank that stopped earlier would leave the others waiting for it.
            raise ValueError(refusal)
        if config is None:
            return
        for kind, bucket_groups, group in kinds:
            # From here on all ranks of the group have the same settings, and so do the same.
            check_agreement(self._attach_kind(kind, bucket_groups, group, ddp, config, attached), group)
            if bucket_groups:
                self._check_collectives(group, ddp.ddp_config.average_in_collective)
        if not ddp.expert_parallel_bucket_groups:
            self._placement.settle_nothing(config)
        self.states += attached.states
        self._reserve_scratch(attached, overlap=ddp.ddp_config.overlap_grad_reduce)
        report(attached, ddp.ddp_config, config)

    def _attach_kind(
        self, kind: str, bucket_groups: list[Any], group: Any, ddp: Any, config: LoCoConfig, attached: Attached
    ) -> dict[str, object]:
        # All buckets of a kind are reduced over one group. Returns what its ranks must have in common.
        topology = self._placement.settle(group, config)
        instances: Sequence[int] = ()
        if ddp.ddp_config.num_distributed_optimizer_instances > 1:
            instances = find_nodes(ddp.inter_dist_opt_group, config.ranks_per_node)
        facts: dict[str, object] = {"number of buckets": sum(len(g.buckets) for g in bucket_groups)}
        of_kind = len(attached.states)
        previous = None
        # Not Megatron's bucket_id, which starts anew in the buffer of each dtype.
        numbers = count()
        for bucket_group in bucket_groups:
            states = []
            for bucket in bucket_group.buckets:
                name = f"{kind} bucket {next(numbers)}"
                if group.size() == 1:
                    attached.num_of_one_rank += 1
                elif num_gradients(bucket) < config.min_bucket_numel:
                    attached.small.append(bucket)
                    facts[f"layout of {name}"] = (bucket.grad_data.numel(), "reduced exactly")
                else:
                    state = self._bucket_state(name, bucket, bucket_group, topology, config, attached.names)
                    # Not the state's own layout: in two levels it depends on the rank's position on its node.
                    facts[f"layout of {name}"] = (state.exchange.numel, hash(state.exchange))
                    states.append((bucket, state))
            attached.states += [state for _, state in states]
            bucket_group.loco_states = states
            bucket_group.loco_model_config = ddp.config
            bucket_group.loco_is_reduced = False
            bucket_group.loco_stock = [
                _StockExchange(bucket, group.size(), topology.nodes if bucket in attached.small else (), instances)
                for bucket in bucket_group.buckets
            ]
            bucket_group.loco_previous = previous
            previous = bucket_group
            peer = group.rank() // topology.ranks_per_node if topology.kind == TWO_LEVEL else group.rank()
            for pool in dict.fromkeys(state.scratch for _, state in states):
                sizes = [size for _, state in states for size in state.scratch_bytes(peer)]
                attached.scratch.setdefault(pool, {}).setdefault(kind, []).append(sizes)
        if group.rank() == 0 and of_kind < len(attached.states):
            attached.topologies.append(describe(kind, topology, attached.states[of_kind:]))
        return facts

    def _reserve_scratch(self, attached: Attached, *, overlap: bool) -> None:
        # With overlap a group of each kind is on its way while its predecessor of that kind is finished; else all take
        # turns. Reserved now, so that a lack of memory shows before the warm-up and not after it.
        for pool, kinds in attached.scratch.items():
            if overlap:
                pool.reserve([size for groups in kinds.values() for size in sizes_in_flight(groups, at_once=2)])
            else:
                pool.reserve(sizes_in_flight([group for groups in kinds.values() for group in groups], at_once=1))

    def _check_collectives(self, group: Any, average: bool) -> None:
        # Once per group: its buckets, and the model chunks of a stage, share it.
        if (group.group_name, average) not in self._checked:
            check_collectives(group, average=average)
            node_groups = self._placement.node_groups(group)
            if node_groups is not None:
                check_collectives(node_groups.inside_node, average=average)
                check_collectives(node_groups.between_nodes, average=False)
            self._checked.add((group.group_name, average))

    def dispatcher(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement of ``param_and_grad_buffer.dist_reduce_scatter_func``."""

        def dist_reduce_scatter_func(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            dispatch = self._current()
            if dispatch is None:
                return stock(output, input, *args, **kwargs)
            dispatch.num_reduced += 1
            for exchange in dispatch.stock:
                if exchange.bucket.grad_data is input:
                    exchange.count(self.stock_traffic)
            state = dispatch.state_of(input)
            if state is None:
                return stock(output, input, *args, **kwargs)
            unit = self.unit.of(dispatch.model_config, state.config, input.device)
            node_groups = self._placement.node_groups(kwargs["group"])
            work = reduce_scatter(output, input, state, unit=unit, exact=stock, node_groups=node_groups, **kwargs)
            # An exact reduction returns what the coalescing manager gives it; the manager waits for that one itself.
            if isinstance(work, Work | StreamWork):
                dispatch.works.append(work)
            return work

        return dist_reduce_scatter_func

    def wrap_start_grad_sync(self, stock: Callable[..., None]) -> Callable[..., None]:
        """Return the replacement of ``_ParamAndGradBucketGroup.start_grad_sync``."""

        def start_grad_sync(bucket_group: Any, force_all_reduce: bool | None = False) -> None:
            states = getattr(bucket_group, "loco_states", None)
            if states is None:
                return stock(bucket_group, force_all_reduce=force_all_reduce)
            if bucket_group.is_first_batch and bucket_group.grad_reduce_handle is not None:
                return stock(bucket_group, force_all_reduce=force_all_reduce)  # does nothing: it is on its way
            if states:
                if bucket_group.loco_is_reduced:
                    # Stock would reduce a mixture of reduced shards and local gradients.
                    raise RuntimeError(
                        f"LoCo: the gradients of {states[0][1].name} are reduced a second time; call "
                        "zero_grad_buffer() of the model before each step, and finish_grad_sync() once"
                    )
                self.unit.check_known(bucket_group.loco_model_config, states[0][1].config)
            if bucket_group.loco_previous is not None:
                _finish_transfers(bucket_group.loco_previous)
            of_group = _Dispatch(states, bucket_group.loco_stock, bucket_group.loco_model_config)
            with self._dispatching(of_group) as dispatch:
                stock(bucket_group, force_all_reduce=force_all_reduce)
            if not force_all_reduce and dispatch.num_reduced != len(bucket_group.buckets):
                raise RuntimeError(
                    "LoCo: the gradients were reduced without it. Something replaced dist_reduce_scatter_func in "
                    "megatron.core.distributed.param_and_grad_buffer after LoCo was installed, as Megatron does for a "
                    "model with reduce_scatter_with_fp32_accumulation; do without it in this process"
                )
            bucket_group.loco_is_reduced = True
            if force_all_reduce:
                for _, state in states:
                    state.count_all_reduce()
                for exchange in bucket_group.loco_stock:
                    exchange.count(self.stock_traffic, all_reduce=True)
            if dispatch.works:
                bucket_group.grad_reduce_handle = _GroupWork([bucket_group.grad_reduce_handle, *dispatch.works])
            return None

        return start_grad_sync

    def wrap_reset(self, stock: Callable[..., None]) -> Callable[..., None]:
        """Return the replacement of ``_ParamAndGradBucketGroup.reset``, part of ``zero_grad_buffer``."""

        def reset(bucket_group: Any) -> None:
            stock(bucket_group)
            bucket_group.loco_is_reduced = False

        return reset

    def _bucket_state(
        self,
        name: str,
        bucket: Any,
        bucket_group: Any,
        topology: Topology,
        config: LoCoConfig,
        param_names: dict[Any, str],
    ) -> BucketState:
        grad_data = bucket.grad_data
        exchange = plan_exchange(
            grad_data.numel(),
            topology.nodes,
            [
                ParamSpan(start, stop, exact=config.is_exact(param_names[param], param.dim()))
                for param, (start, stop) in gradient_spans(bucket).items()
            ],
            two_level=topology.kind == TWO_LEVEL,
            bits=config.bits,
            block_size=config.block_size,
            exact_itemsize=grad_data.element_size(),
            chunk_bytes=chunk_bytes(config, grad_data.device),
        )
        device = grad_data.device
        # With several optimizer instances Megatron reduces dense and expert buckets on a stream each, which are not
        # ordered: they must not share memory.
        stream = getattr(bucket_group, "communication_stream", None)
        scratch = self._scratch.setdefault((device, stream), ScratchPool(device))
        layout = exchange.layout(bucket_group.intra_distributed_optimizer_instance_rank)
        return BucketState(name, layout, config, device, scratch, exchange)

    def _current(self) -> _Dispatch | None:
        stack = getattr(self._in_progress, "stack", None)
        return stack[-1] if stack else None

    @contextmanager
    def _dispatching(self, dispatch: _Dispatch) -> Iterator[_Dispatch]:
        # A stack: stock may finish the predecessor of a group first, and in the first batch so start it.
        if not hasattr(self._in_progress, "stack"):
            self._in_progress.stack = []
        self._in_progress.stack.append(dispatch)
        try:
            yield dispatch
        finally:
            self._in_progress.stack.pop()


def _finish_transfers(bucket_group: Any) -> None:
    # So that the scratch memory of two groups is in flight at most. As stock does since 0.18 for an all-to-all of its
    # own, but leaving the handle where it is: finish_grad_sync of every release waits for it once more, in vain.
    if isinstance(bucket_group.grad_reduce_handle, _GroupWork):
        bucket_group.grad_reduce_handle.wait()


def _refusal(ddp: Any) -> str | None:
    """Why LoCo cannot work on a model, or ``None``.

    Users of megatron.core without Megatron's command line meet these here; the others at argument check.
    """
    settings = ddp.ddp_config
    if any(getattr(param, "is_managed_by_layer_wise_optimizer", False) for param in ddp.module.parameters()):
        return (
            "the model is laid out for a layer-wise optimizer (Muon, SOAP, Lion), which updates whole matrices on one "
            "rank; use Adam or SGD under the distributed optimizer, with which LoCo is verified"
        )
    if not settings.use_distributed_optimizer:
        return (
            "LoCo compresses the reduce-scatter of the distributed optimizer, and this model all-reduces: set "
            "use_distributed_optimizer=True (--use-distributed-optimizer)"
        )
    if settings.reduce_scatter_with_fp32_accumulation:
        return "LoCo always sums in fp32: leave reduce_scatter_with_fp32_accumulation off"
    if settings.nccl_ub:
        return "LoCo sends from its own memory, which is not registered as NCCL user buffers: leave nccl_ub off"
    if settings.reuse_grad_buf_for_mxfp8_param_ag:
        return (
            "sharing the gradient buffer with the gather of mxfp8 parameters needs Transformer Engine and is not "
            "verified with LoCo: leave reuse_grad_buf_for_mxfp8_param_ag off"
        )
    if captures_whole_step(ddp.config):
        return (
            "a captured step would repeat the warm-up, reset and dither of one step for ever: use another "
            "cuda_graph_impl (until Megatron 0.17: another cuda_graph_scope) than full_iteration"
        )
    if waits_for_wrong_stream(settings):
        return (
            "with several optimizer instances and overlap, Megatron 0.16 waits for the wrong stream "
            "(Megatron-LM issue 3670): leave overlap_grad_reduce (--overlap-grad-reduce) or "
            "num_distributed_optimizer_instances (--num-distributed-optimizer-instances) off, or use Megatron 0.17"
        )
    if any(getattr(param, "is_gtp_weight_remat", False) for param in ddp.module.parameters()):
        return (
            "sharded tensor-parallel weights need Transformer Engine and are not verified with LoCo: leave "
            "tensor_parallel_num_weight_shards at 1"
        )
    return None
