"""What is kept of the state of one DDP bucket between two lives of a process."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from megatron_loco.collectives.saved_state import column_names, damaged_tensors, load_counters, save_counters, signature
from megatron_loco.collectives.state import BucketState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedBucket:
    """A bucket and its state; picklable, on the CPU.

    Attributes:
        names: Parameters, in the order of the bucket.
        step: Reductions so far; 0 where the bucket is reduced exactly.
        signature: What the meaning of the error depends on.
        columns, counters: As :func:`megatron_loco.collectives.saved_state.save_counters` has them; ``None`` where the
            bucket is reduced exactly.
        error: Its tensors; empty where none is kept.
    """

    names: tuple[str, ...]
    step: int = 0
    signature: object = None
    columns: list[str] = field(default_factory=list)
    counters: Tensor | None = None
    error: dict[str, Tensor] = field(default_factory=dict)

    def damaged(self) -> list[str]:
        """Name what is not as it was saved."""
        if self.counters is None or not self.error:
            return []
        return damaged_tensors([(f"bucket of {self.names[0]}", self.error)], self.counters, self.columns)

    def without_error(self) -> SavedBucket:
        """The same, to start with zero error."""
        return dataclasses.replace(self, signature=None, error={})


def save_bucket(names: tuple[str, ...], state: BucketState | None) -> SavedBucket:
    """Copy what a bucket has; ``None`` is one that is reduced exactly."""
    if state is None:
        return SavedBucket(names)
    error = state.error.tensors() if state.config.save_error == "always" else {}
    return SavedBucket(
        names=names,
        step=state.step,
        signature=signature(state),
        columns=column_names(),
        counters=save_counters([state]).cpu(),
        error={name: tensor.cpu().clone() for name, tensor in error.items()},
    )


def load_bucket(saved: SavedBucket, state: BucketState) -> None:
    """Put it into a fresh state of the same parameters.

    The error comes with it if it is of the same layout; otherwise it is zero, and a warning says so.
    """
    fits = saved.signature == signature(state)
    if saved.error and not fits and state.config.load_error == "auto" and dist.get_rank() == 0:
        logger.warning("LoCo: the saved error of the %s is in other blocks: it starts at zero", state.name)
    if not fits or not saved.error or state.config.load_error == "never":
        state.resume(saved.step)
        return
    assert saved.counters is not None  # a bucket with an error has them
    for name, tensor in state.error.tensors().items():
        tensor.copy_(saved.error[name])
    load_counters([state], saved.counters, saved.columns)
