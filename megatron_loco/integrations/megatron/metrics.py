"""What LoCo did, per logging interval: to the console beside Megatron's own line, to TensorBoard and Weights &
Biases."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_loco.collectives.agreement import check_agreement, settings_facts
from megatron_loco.collectives.state import BucketState, Traffic
from megatron_loco.config import LoCoConfig
from megatron_loco.kernels.schema import NUM_STATISTICS, Statistics


@dataclass(frozen=True)
class Interval:
    """Figures of one logging interval over all ranks. Bytes are per rank and step."""

    wire_bytes: float
    bf16_bytes: float
    internode_bytes: float
    bf16_internode_bytes: float
    bits_per_element: float
    relative_error: float
    error_norm: float
    nonfinite_blocks: int
    exact_steps: int

    def scalars(self) -> dict[str, float]:
        """Name and value of each figure, as TensorBoard shows them."""
        return {
            "loco/wire-bytes-per-step": self.wire_bytes,
            "loco/bf16-ring-bytes-per-step": self.bf16_bytes,
            "loco/internode-bytes-per-step": self.internode_bytes,
            "loco/bf16-ring-internode-bytes-per-step": self.bf16_internode_bytes,
            "loco/bits-per-element": self.bits_per_element,
            "loco/relative-compression-error": self.relative_error,
            "loco/error-state-norm": self.error_norm,
            "loco/nonfinite-blocks": self.nonfinite_blocks,
            "loco/exact-steps": self.exact_steps,
        }

    def line(self, iteration: int, train_iters: int | None) -> str:
        """The console line, in the style of Megatron's own."""
        ratio = self.bf16_bytes / self.wire_bytes if self.wire_bytes else math.nan
        between_nodes = ""
        if self.bf16_internode_bytes:
            between_nodes = (
                f" of it to other nodes: {self.internode_bytes / 1e6:.3f} | bf16 ring:"
                f" {self.bf16_internode_bytes / 1e6:.3f} |"
            )
        text = (
            f" [loco] iteration {iteration:8d}/{train_iters or 0:8d} |"
            f" wire (MB/step/rank): {self.wire_bytes / 1e6:.3f} | bf16 would send (MB): {self.bf16_bytes / 1e6:.3f} |"
            f" ratio: {ratio:.2f} |{between_nodes}"
            f" bits per element: {self.bits_per_element:.2f} | relative compression error: {self.relative_error:.3E} |"
            f" error-state norm: {self.error_norm:.3E} |"
        )
        if self.exact_steps:
            text += f" exact steps: {self.exact_steps} |"
        if self.nonfinite_blocks:
            text += f" blocks with NaN or Inf: {self.nonfinite_blocks} |"
        return text


class Metrics:
    """Turns counters and statistics of the bucket states into one :class:`Interval` per logging interval.

    Args:
        states: All bucket states, also those that are added later.
        stock_traffic: What Megatron's own functions send for the same models: small buckets, all-reduces across
            optimizer instances. Part of the bytes, not of the errors.
    """

    def __init__(self, states: Sequence[BucketState], stock_traffic: Traffic | None = None) -> None:
        self._states = states
        self._stock_traffic = stock_traffic or Traffic()
        self._last = [0.0] * len(self._totals())
        self.last_logged: int | None = None
        """Iteration at which the last interval ended; before the first one, the iteration this process started from."""

    def restart(self) -> None:
        """Count from here: the counters of the states were set from a checkpoint."""
        self._last = self._totals()

    def interval(self, num_steps: int, group: dist.ProcessGroup | None = None) -> Interval:
        """Close the interval. A collective: every rank of ``group`` must call it.

        Args:
            num_steps: Optimizer steps in the interval.
            group: All ranks of the job (default: the default group).

        Errors and norms are those of the interval's last step.
        """
        totals = self._totals()
        since = [total - last for total, last in zip(totals, self._last, strict=True)]
        self._last = totals
        device = self._states[0].statistics.device if self._states else torch.device(_default_device())
        statistics = torch.zeros(NUM_STATISTICS, dtype=torch.float64, device=device)
        for state in self._states:
            of_state = state.statistics.clone()
            # Squares in the unit of that step: the same figures whatever the loss scale and the number of tokens.
            of_state[: Statistics.NONFINITE_BLOCKS] /= state.unit.double().square()
            statistics += of_state
        sums = torch.cat([statistics, torch.tensor(since[:-1], dtype=torch.float64, device=device)])
        dist.all_reduce(sums, group=group)
        exact_steps = torch.tensor(since[-1], dtype=torch.float64, device=device)
        dist.all_reduce(exact_steps, op=dist.ReduceOp.MAX, group=group)
        grad_sq, residual_sq, error_sq, nonfinite, *sent_sums = sums.tolist()
        sent, inner, internode, elements, bf16, bf16_internode = sent_sums
        per_rank_step = dist.get_world_size(group) * max(1, num_steps)
        assert (Statistics.GRAD_SQ, Statistics.RESIDUAL_SQ, Statistics.ERROR_SQ) == (0, 1, 2)
        return Interval(
            wire_bytes=sent / per_rank_step,
            bf16_bytes=bf16 / per_rank_step,
            internode_bytes=internode / per_rank_step,
            bf16_internode_bytes=bf16_internode / per_rank_step,
            # The first hop of two levels is exact, and left out: how well LoCo compresses does not show in it.
            bits_per_element=8 * (sent - inner) / elements if elements else 0.0,
            relative_error=math.sqrt(residual_sq / grad_sq) if grad_sq else 0.0,
            error_norm=math.sqrt(error_sq),
            nonfinite_blocks=int(nonfinite),
            exact_steps=int(exact_steps.item()),
        )

    def _totals(self) -> list[float]:
        traffic = [*(state.traffic for state in self._states), self._stock_traffic]
        return [
            sum(t.sent_bytes for t in traffic),
            sum(t.inner_bytes for t in traffic),
            sum(t.internode_bytes for t in traffic),
            sum(t.elements for t in traffic),
            sum(t.bf16_bytes for t in traffic),
            sum(t.bf16_internode_bytes for t in traffic),
            float(max((t.exact_steps for t in traffic), default=0)),
        ]


def wrap_training_log(
    stock: Callable[..., Any], metrics: Callable[[], Metrics | None], settings: Callable[[], LoCoConfig | None]
) -> Callable[..., Any]:
    """Return the replacement of ``megatron.training.training.training_log``, which every rank calls at every step.

    The first call compares the settings of all ranks: at the start, ranks were compared within data-parallel groups
    only, and pipeline stages that differ would wait for each other in :meth:`Metrics.interval`.

    Args:
        stock: The original.
        metrics: Returns the metrics, or ``None`` where LoCo is off.
        settings: Returns the settings, or ``None`` where LoCo is off.
    """
    signature = inspect.signature(stock)
    compared = False

    def training_log(*args: Any, **kwargs: Any) -> Any:
        nonlocal compared
        if not compared:
            everyone = dist.group.WORLD
            assert everyone is not None
            check_agreement(settings_facts(settings()), everyone)
            compared = True
        result = stock(*args, **kwargs)
        current = metrics()
        bound = signature.bind(*args, **kwargs).arguments
        if current is not None:
            _log(current, int(bound["iteration"]))
        return result

    return training_log


def _log(metrics: Metrics, iteration: int) -> None:
    from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer, print_rank_last

    args = get_args()
    if metrics.last_logged is None:
        metrics.last_logged = iteration - 1
    if iteration % args.log_interval:
        return
    interval = metrics.interval(iteration - metrics.last_logged)
    metrics.last_logged = iteration
    print_rank_last(interval.line(iteration, args.train_iters))
    writer = get_tensorboard_writer()
    if writer:
        for name, value in interval.scalars().items():
            writer.add_scalar(name, value, iteration)
    wandb_writer = get_wandb_writer()
    if wandb_writer:
        wandb_writer.log(interval.scalars(), iteration)


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
