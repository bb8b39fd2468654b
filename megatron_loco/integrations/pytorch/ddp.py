"""LoCo in ``torch.nn.parallel.DistributedDataParallel``: a communication hook, in the style of PowerSGD's.

Each bucket is reduced to its owners in a few bits and gathered in a chosen width
(:mod:`megatron_loco.collectives.all_reduce`), so that all replicas get the same bits. The gather of a bucket starts
when the next one has been sent: always in the order of the buckets, which is the same on all ranks.

DDP rebuilds its buckets after the first backward pass. The error belongs to the old ones, and starts anew. After a
restart it would begin with the first buckets again: with a loaded state, gradients of that pass are put into the
buckets that the state is of, and reduced as the uninterrupted run would have.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with its types.

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from megatron_loco.collectives.agreement import check_agreement
from megatron_loco.collectives.all_reduce import AllReduce, padded_numel, start_all_reduce
from megatron_loco.collectives.state import BucketState
from megatron_loco.config import LoCoConfig
from megatron_loco.core.wire import ParamSpan
from megatron_loco.integrations.pytorch.checkpoint import raise_together
from megatron_loco.integrations.pytorch.ddp_saved import SavedBucket, load_bucket, save_bucket
from megatron_loco.integrations.pytorch.model_states import GradientScale, ModelStates

logger = logging.getLogger(__name__)

Names = tuple[str, ...]
"""Parameters of a bucket, in its order: what a state belongs to."""


class LoCoState:
    """State of the hook: ``model.register_comm_hook(state, loco_hook)`` after :meth:`bind`, or :func:`apply` for both.

    Picklable without its process group; :meth:`bind` it to the model again afterwards.

    Args:
        config: Settings, equal on all ranks.
        gather_dtype: In what the averaged gradients travel back; default: their own. ``torch.bfloat16`` halves what
            fp32 sends there, and rounds.
        gradient_scale: Returns what the gradients are multiplied by at present (a gradient scaler's ``get_scale``).
    """

    def __init__(
        self,
        config: LoCoConfig,
        *,
        gather_dtype: torch.dtype | None = None,
        gradient_scale: GradientScale | None = None,
    ) -> None:
        self.config = config
        self.gather_dtype = gather_dtype
        self.gradient_scale = gradient_scale
        self._loaded: list[SavedBucket] = []
        self._unbind()

    def _unbind(self) -> None:
        self._model_states = ModelStates(self.config, self.gradient_scale, self.gather_dtype)
        self._names: dict[int, str] = {}
        self._group: dist.ProcessGroup | None = None
        self._states: dict[Names, BucketState | None] = {}
        self._step = 0
        self._previous: tuple[AllReduce, Future[Tensor]] | None = None
        self._staged: list[_Staged] = []

    def bind(self, model: DistributedDataParallel) -> None:
        """Get to know the parameters and the process group of ``model``. A collective: every rank must call it.

        Raises:
            ValueError: ranks disagree, or the model holds sparse gradients.
            RuntimeError: a collective of the group returns wrong results.
        """
        self._unbind()
        self._group = model.process_group
        self._names = {id(param): name.replace("_orig_mod.", "") for name, param in model.module.named_parameters()}
        for name, module in model.module.named_modules():
            if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
                raise ValueError(f"LoCo: {name} has sparse gradients; use sparse=False")
        assert self._group is not None
        self._model_states.settle(self._group, average=False)
        self._check_loaded()

    def __getstate__(self) -> dict[str, Any]:
        return {
            "config": self.config,
            "gather_dtype": self.gather_dtype,
            "gradient_scale": self.gradient_scale,
            "buckets": self._saved(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(  # type: ignore[misc]
            state["config"], gather_dtype=state["gather_dtype"], gradient_scale=state["gradient_scale"]
        )
        self._loaded = state["buckets"]

    @property
    def states(self) -> list[BucketState]:
        """The states of the buckets that exist, in order."""
        return [state for state in self._states.values() if state is not None]

    @property
    def model_states(self) -> ModelStates:
        """What belongs to all of them: traffic, exact reductions."""
        return self._model_states

    def discard(self) -> None:
        """Take the last reductions back: the optimizer step was skipped (a gradient scaler found an overflow)."""
        for state in self.states:
            state.discard()

    def state_dict(self) -> dict[str, Any]:
        """Error state and counters of this rank, on the CPU. Every rank has its own: save all of them."""
        assert self._group is not None, "bind() comes first"
        return {"rank": self._group.rank(), "world_size": self._group.size(), "buckets": self._saved()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned on this rank, at the next backward pass. A collective.

        Of another number of ranks only the counters are taken: the error starts at zero, which one warning says.

        Raises:
            ValueError: it is another rank's, or damaged on any rank.
        """
        assert self._group is not None, "bind() comes first"
        rank, world_size = state_dict["rank"], state_dict["world_size"]
        buckets: list[SavedBucket] = state_dict["buckets"]
        if world_size != self._group.size():
            if self._group.rank() == 0:
                logger.warning(
                    "LoCo: the state was saved by %d ranks, and here are %d: the run starts with zero error",
                    world_size,
                    self._group.size(),
                )
            buckets = [bucket.without_error() for bucket in buckets]
        elif rank != self._group.rank():
            raise ValueError(f"LoCo: this is the state of rank {rank}, not of rank {self._group.rank()}")
        self._loaded = buckets
        self._check_loaded()

    def _check_loaded(self) -> None:
        # Now and on all ranks together, not in the next backward pass on one of them.
        assert self._group is not None
        damaged = (
            [] if self.config.load_error == "never" else [text for each in self._loaded for text in each.damaged()]
        )
        raise_together(damaged, self._group)
        # A step decides whether a reduction is exact, names decide what is reduced together.
        check_agreement({"LoCo's saved buckets": [(bucket.step, bucket.names) for bucket in self._loaded]}, self._group)

    def _saved(self) -> list[SavedBucket]:
        if self._loaded:  # nothing has been reduced since
            return self._loaded
        return [save_bucket(names, state) for names, state in self._states.items()]

    # --- the hook

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Reduce a bucket; called by DDP in the order of its buckets, each when its gradients are complete."""
        assert self._group is not None, "bind() comes first"
        buffer = bucket.buffer()
        if bucket.index() == 0:
            # Of all states, at the start of a pass: a bucket that is new in it has been reduced as often.
            self._step = max((state.step for state in self.states), default=0)
        # Before the sum, as DDP does without a hook: the identity codec then gives the same bits.
        buffer.div_(self._group.size())
        params = {self._names[id(param)]: param.detach() for param in bucket.parameters()}
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        if self._loaded and tuple(params) not in {saved.names for saved in self._loaded}:
            self._staged.append(_Staged(params, buffer, future))
        else:
            self._start(buffer, params, future)
        if bucket.is_last():
            self._complete_previous()
            self._reduce_staged()
            self._loaded = []
        return future

    def _start(self, tensor: Tensor, params: Mapping[str, Tensor], future: Future[Tensor]) -> None:
        assert self._group is not None
        names = tuple(params)
        state = self._state_of(names, params, tensor)
        if state is None:
            for _ in range(2):  # an all-reduce has two passes
                self._model_states.count_exact(
                    f"bucket of {names[0]}",
                    "it is smaller than min_bucket_numel",
                    tensor.numel(),
                    self._group,
                    tensor.element_size(),
                )
            transfer = dist.all_reduce(tensor, group=self._group, async_op=True)
            assert transfer is not None
            _when_done(transfer, lambda: tensor, future)
            return
        reduction = start_all_reduce(
            tensor,
            state,
            op=dist.ReduceOp.SUM,
            group=self._group,
            gather_dtype=self.gather_dtype,
            unit=self._model_states.unit(tensor.device),
            node_groups=self._model_states.node_groups(self._group),
        )
        if not isinstance(reduction, AllReduce):
            _when_done(reduction, lambda: tensor, future)
            return
        # This one is on its way before the one before it is waited for.
        self._complete_previous()
        self._previous = reduction, future

    def _complete_previous(self) -> None:
        if self._previous is not None:
            reduction, future = self._previous
            self._previous = None
            _when_done(reduction.gather(), reduction.finish, future)

    def _state_of(self, names: Names, params: Mapping[str, Tensor], tensor: Tensor) -> BucketState | None:
        if names in self._states:
            return self._states[names]
        assert self._group is not None
        # Buckets were rebuilt. The error of the old ones is in other blocks of other owners.
        old = [known for known in self._states if not set(known).isdisjoint(names)]
        removed = [self._states.pop(known) for known in old]
        for state in removed:
            if state is not None:
                self._model_states.remove(state.name)
        numel = tensor.numel()
        if self._group.size() == 1 or numel < self.config.min_bucket_numel:
            self._states[names] = None
            return None
        ends = list(accumulate(param.numel() for param in params.values()))
        state = self._model_states.make(
            f"bucket of {names[0]} to {names[-1]}",
            padded_numel(numel, self._group.size()),
            [
                ParamSpan(end - param.numel(), end, self.config.is_exact(name, param.dim()))
                for (name, param), end in zip(params.items(), ends, strict=True)
            ],
            self._group,
            tensor.dtype,
            tensor.device,
            stream="backward",
        )
        self._states[names] = state
        saved = next((saved for saved in self._loaded if saved.names == names), None)
        if saved is not None:
            load_bucket(saved, state)
        else:
            state.resume(self._step)
        return state

    def _reduce_staged(self) -> None:
        # After a restart DDP begins with its first buckets, and the loaded states are of rebuilt ones.
        staged, self._staged = self._staged, []
        if not staged:
            return
        pieces = {name: piece for each in staged for name, piece in each.pieces().items()}
        params = {name: param for each in staged for name, param in each.params.items()}
        wanted = [saved.names for saved in self._loaded if not set(saved.names).isdisjoint(pieces)]
        if sorted(name for names in wanted for name in names) != sorted(pieces):
            if self._model_states.is_first_rank:
                logger.warning("LoCo: the loaded state is of other parameters: the run starts with zero error")
            wanted = [tuple(each.params) for each in staged]
            self._loaded = []
        for names in wanted:
            tensor = torch.cat([pieces[name] for name in names])
            future: Future[Tensor] = Future(devices=[tensor.device] if tensor.is_cuda else None)
            self._start(tensor, {name: params[name] for name in names}, future)
            self._complete_previous()
            result = future.wait().split([pieces[name].numel() for name in names])
            for name, piece in zip(names, result, strict=True):
                pieces[name].copy_(piece)
        for each in staged:
            each.future.set_result(each.buffer)


@dataclass
class _Staged:
    # A bucket of DDP that waits for the rest of the pass.
    params: dict[str, Tensor]
    buffer: Tensor
    future: Future[Tensor]

    def pieces(self) -> dict[str, Tensor]:
        # In the order of memory, also where a parameter has strides of its own.
        return dict(zip(self.params, self.buffer.split([param.numel() for param in self.params.values()]), strict=True))


def _when_done(transfer: dist.Work, finish: Callable[[], Tensor], future: Future[Tensor]) -> None:
    # In a callback and not in a chain of futures: `future` had to exist before the transfer.
    def complete(done: Future[Any]) -> None:
        try:
            done.value()
            future.set_result(finish())
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]  # typed as a result in torch

    transfer.get_future().then(complete)


def loco_hook(state: LoCoState, bucket: GradBucket) -> Future[Tensor]:
    """The communication hook, for ``model.register_comm_hook(state, loco_hook)``.

    Args:
        state: Bound to the model.
        bucket: Gradients of this rank.

    Returns:
        The averaged gradients, the same bits on all ranks.
    """
    return state.reduce(bucket)


def apply(model: DistributedDataParallel, config: LoCoConfig | LoCoState) -> LoCoState:
    """Compress the gradient reduction of ``model``: bind a state to it and register the hook.

    Args:
        model: On all ranks, before its first backward pass.
        config: Settings, equal on all ranks; or a state, with settings of its own or from a pickle.

    Returns:
        The state; keep it for checkpoints.

    Raises:
        ValueError, RuntimeError: as :meth:`LoCoState.bind`; DDP itself refuses a second hook.
    """
    state = config if isinstance(config, LoCoState) else LoCoState(config)
    state.bind(model)
    model.register_comm_hook(state, loco_hook)
    return state
