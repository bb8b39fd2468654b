"""States of an FSDP2 model in ``torch.distributed.checkpoint``, by the usual ``Stateful`` calls.

The error of a rank belongs to its own gradients in its own blocks, so every rank saves its own, under keys that hold
its rank, the number of ranks and a digest of the layout. Another layout does not find its keys:
:meth:`SavedStates.fits` says so beforehand, and the run then goes on with zero error.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.storage import StorageReader

from megatron_loco.collectives.agreement import check_agreement, group_device
from megatron_loco.collectives.saved_state import column_names, damaged, load_counters, save_counters, signature
from megatron_loco.collectives.state import BucketState
from megatron_loco.core.error_feedback import reset_error
from megatron_loco.integrations.pytorch.model_states import ModelStates

logger = logging.getLogger(__name__)

NAME = "loco"
"""Name of the entry in the dictionary that is saved, unless another one is given."""


class SavedStates:
    """A ``torch.distributed.checkpoint.stateful.Stateful``; see the module."""

    def __init__(self, model_states: ModelStates) -> None:
        self._model_states = model_states

    @property
    def states(self) -> list[BucketState]:
        """The states of the model, in the order of their names: when each was made depends on the backward pass."""
        return [state for _, state in sorted(self._model_states.states.items())]

    @property
    def model_states(self) -> ModelStates:
        """What belongs to all of them: traffic, exact reductions."""
        return self._model_states

    def prepare_states(self) -> None:
        """Make states that do not exist yet."""

    def discard(self) -> None:
        """Take the last reduction of every bucket back: the optimizer step was skipped."""
        self._model_states.discard()

    def state_dict(self) -> dict[str, Any]:
        """Error tensors, counters and checksums of this rank; the tensors are the live ones."""
        self.prepare_states()
        states = self.states
        if not states:
            return {}
        saved: dict[str, Any] = {"counters": save_counters(states), "columns": json.dumps(column_names())}
        if self._model_states.config.save_error == "always":
            saved["error"] = {
                f"{index}": {name: tensor for name, tensor in state.error.tensors().items() if tensor.numel()}
                for index, state in enumerate(states)
            }
        return {self._key(): saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned. A collective: every rank must call it.

        Raises:
            ValueError: on every rank, if one got the state of another layout or a damaged one.
        """
        self.prepare_states()
        states = self.states
        config = self._model_states.config
        problems = []
        saved = state_dict.get(self._key())
        if saved is None and states:
            problems = ["it is of another layout of ranks, parameters or blocks: leave it out (see fits)"]
        elif saved is not None:
            errors = saved.get("error", {})
            for index, state in enumerate(states):
                for name, tensor in state.error.tensors().items():
                    if name in errors.get(f"{index}", {}):
                        tensor.copy_(errors[f"{index}"][name])
            columns = json.loads(saved["columns"])
            if "error" in saved and config.load_error == "auto":
                problems = damaged(states, saved["counters"], columns)
        raise_together(problems, _world())
        if saved is None:
            return
        load_counters(states, saved["counters"], columns)
        if "error" not in saved or config.load_error == "never":
            for state in states:
                reset_error(state.error)
        # A step decides whether a reduction is exact.
        check_agreement({"LoCo's step": [state.step for state in states]}, _world())

    def fits(self, checkpoint_id: str | os.PathLike[str] | None = None, *, reader: StorageReader | None = None,
             name: str = NAME) -> bool:  # fmt: skip
        """Whether a checkpoint holds the states of this layout on all ranks. A collective: every rank must call it.

        Args:
            checkpoint_id: Its folder, as given to ``dcp.load``.
            reader: Or what reads it.
            name: Under which name the states were saved.

        Returns:
            If not, leave the states out of ``dcp.load``; one warning on rank 0 says what that means.
        """
        reader = reader or FileSystemReader(str(checkpoint_id))
        keys = reader.read_metadata().state_dict_metadata
        self.prepare_states()
        prefix = f"{name}.{self._key()}."
        here = not self.states or any(key.startswith(prefix) for key in keys)
        everywhere = _all(here, _world())
        if not everywhere and dist.get_rank() == 0:
            held = any(key.startswith(f"{name}.rank") for key in keys)
            why = "is of another number of ranks, other parameters or other blocks" if held else "is not there"
            logger.warning("LoCo: the error state in the checkpoint %s: the run starts with zero error", why)
        return everywhere

    def _key(self) -> str:
        digest = hashlib.sha256(json.dumps([signature(state) for state in self.states]).encode()).hexdigest()[:12]
        return f"rank{dist.get_rank()}_of_{dist.get_world_size()}_{digest}"


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None  # the model is sharded over it
    return group


def _all(value: bool, group: dist.ProcessGroup) -> bool:
    flag = torch.tensor([int(value)], device=group_device(group))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag.item())


def raise_together(problems: list[str], group: dist.ProcessGroup) -> None:
    """Raise a ValueError on every rank of ``group`` if one has problems with what it loads. A collective."""
    if not _all(not problems, group):
        here = "; ".join(problems) or "another rank's"
        raise ValueError(
            f"LoCo: the error state cannot be loaded: {here}. A damaged one: load_error='never' starts with zero error"
        )
