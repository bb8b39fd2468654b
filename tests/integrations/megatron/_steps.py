"""Optimizer steps of a small model under Megatron's real DDP, distributed optimizer and loss scaler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_loco.collectives.state import BucketState
from megatron_loco.config import LoCoConfig
from megatron_loco.core.error_feedback import load_error
from tests.integrations.megatron._ddp import SHAPES, Case, Prescribed, buckets, shards

Poison = Callable[[list[Tensor]], None]
SMALL = 2.0**-6
"""Factor of the gradients, so that a loss scale of 2^16 does not overflow fp16."""


@dataclass(frozen=True)
class Setup:
    """One model and how it is trained; powers of two as loss scales commute with all rounding."""

    fp16: bool = True
    initial_scale: float = 2.0**12
    constant_scale: float | None = None
    growth_interval: int = 1000
    hysteresis: int = 1
    grad_reduce_in_fp32: bool = True
    overlap: bool = False
    overlap_param_gather: bool = False
    average: bool = False
    num_micro_batches: int = 1
    per_token: bool = False
    expert: bool = False
    skip_threshold: float = float("inf")
    shapes: tuple[tuple[int, ...], ...] = SHAPES


@dataclass
class Outcome:
    """What one step did. Shards are divided by everything that multiplied the gradients."""

    updated: bool
    scale: float
    shards: list[Tensor]
    weights: list[Tensor] = field(default_factory=list)


class Training:
    """A model whose gradients are prescribed; make it, and step it, with the patches in place."""

    def __init__(self, setup: Setup, rank: int) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        self.setup = setup
        self.rank = rank
        self.config = TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=1,
            fp16=setup.fp16,
            calculate_per_token_loss=setup.per_token,
        )
        self.ddp: Any = DistributedDataParallel(
            self.config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                overlap_grad_reduce=setup.overlap,
                overlap_param_gather=setup.overlap_param_gather,
                average_in_collective=setup.average,
                grad_reduce_in_fp32=setup.grad_reduce_in_fp32,
            ),
            _Model(torch.float16 if setup.fp16 else torch.float32, setup.expert, setup.shapes),
        )
        self.optimizer: Any = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-3,
                fp16=setup.fp16,
                use_distributed_optimizer=True,
                clip_grad=0.0,
                loss_scale=setup.constant_scale,
                initial_loss_scale=setup.initial_scale,
                min_loss_scale=1.0,
                loss_scale_window=setup.growth_interval,
                hysteresis=setup.hysteresis,
                grad_norm_skip_threshold=setup.skip_threshold,
            ),
            [self.ddp],
        )
        self.config.grad_scale_func = self.optimizer.scale_loss

    @property
    def states(self) -> list[BucketState]:
        """LoCo states of all buckets; empty on stock Megatron."""
        return [s for group in self._groups() for _, s in getattr(group, "loco_states", [])]

    @property
    def scale(self) -> float:
        """The loss scale now."""
        return float(self.optimizer.get_loss_scale().item())

    def set_scale(self, scale: float) -> None:
        """Set the loss scale of every optimizer, as resuming from another checkpoint does."""
        for leaf in self.optimizer.chained_optimizers:
            leaf.grad_scaler._scale.fill_(scale)

    def coefficients(self, seed: int, micro_batch: int = 0, rank: int | None = None) -> list[Tensor]:
        """The gradients that one rank adds in one micro-batch, by parameter."""
        rank = self.rank if rank is None else rank
        return [Case().gradient(shape, rank, seed, micro_batch, i) * SMALL for i, shape in enumerate(self.setup.shapes)]

    def backward(self, seed: int, *, poison: Poison | None = None, factor: float = 1.0) -> None:
        """Zero the gradients, then forward and backward of all micro-batches."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        for micro_batch in range(self.setup.num_micro_batches):
            coefficients = [c * factor for c in self.coefficients(seed, micro_batch)]
            last = micro_batch == self.setup.num_micro_batches - 1
            if poison and last:
                poison(coefficients)
            context: AbstractContextManager[Any] = nullcontext() if last else self.ddp.no_sync()
            with context:
                self.config.grad_scale_func(self.ddp(coefficients)).backward()

    def step(self, seed: int, *, poison: Poison | None = None) -> Outcome:
        """One whole training step."""
        self.backward(seed, poison=poison)
        self.ddp.finish_grad_sync()
        return self.update()

    def update(self) -> Outcome:
        """Step the optimizer with the reduced gradients."""
        scale = self.scale
        reduced = [shard.float() / scale for shard in shards(self.ddp)]
        updated = self.optimizer.step()[0]
        return Outcome(bool(updated), scale, reduced, [w.detach().clone() for w in self.ddp.module.weights])

    def forget(self) -> None:
        """Set the stored errors to zero by hand."""
        for state in self.states:
            for tensor in state.error.tensors().values():
                tensor.zero_()

    def snapshot(self) -> list[tuple[int, float, list[Tensor]]]:
        """Step, unit and stored error of every state, bit for bit."""
        return [(s.step, float(s.unit), [t.clone() for t in s.error.tensors().values()]) for s in self.states]

    def errors(self) -> list[Tensor]:
        """The errors in fp32 without their unit, one per state, shape ``[num_blocks, block_size]``."""
        return [load_error(s.error) / s.unit for s in self.states]

    def _groups(self) -> list[Any]:
        return list(dict.fromkeys(group for group, _ in buckets(self.ddp)))


class _Model(Prescribed):
    # In fp32, as Megatron's loss is: in fp16 a loss scale of 2^16 would overflow.
    def __init__(self, dtype: torch.dtype, expert: bool, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__(dtype, expert)
        if shapes != SHAPES:
            self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(*s, dtype=dtype)) for s in shapes])

    def forward(self, coefficients: Sequence[Tensor]) -> Tensor:
        return torch.stack([(w.float() * c).sum() for w, c in zip(self.weights, coefficients, strict=True)]).sum()


def settings(**changes: Any) -> LoCoConfig:
    """4 bits, small blocks, no warm-up, and no bucket is too small."""
    return LoCoConfig(**{**_SMALL_SETTINGS, **changes})


_SMALL_SETTINGS = {"bits": 4, "block_size": 32, "warmup_steps": 0, "reset_interval": 0, "min_bucket_numel": 0}


def same_snapshot(a: list[tuple[int, float, list[Tensor]]], b: list[tuple[int, float, list[Tensor]]]) -> bool:
    """Whether two snapshots are the same bits."""
    return all(
        x[:2] == y[:2] and all(torch.equal(t, u) for t, u in zip(x[2], y[2], strict=True))
        for x, y in zip(a, b, strict=True)
    )


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether two lists of tensors are the same bits."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def flat_error(state: BucketState, error: Tensor) -> Tensor:
    """Put an error of shape ``[num_blocks, block_size]`` where its elements lie in the bucket, shape ``[numel]``."""
    flat = torch.zeros(state.layout.numel)
    for shard in state.layout.shards:
        for run in shard.runs:
            rows = error[run.first_block : run.first_block + run.num_blocks]
            flat[run.start : run.stop] = rows.reshape(-1)[: run.stop - run.start]
    return flat
