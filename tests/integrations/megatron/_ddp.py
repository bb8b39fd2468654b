"""Megatron's real DistributedDataParallel on Gloo ranks, around a module whose gradients a test prescribes."""

from megatron_loco.bench.prescribed import (
    SHAPES,
    Case,
    Prescribed,
    buckets,
    parallel_megatron,
    reduce_case,
    shards,
    train_step,
    wrap,
)

__all__ = [
    "SHAPES",
    "Case",
    "Prescribed",
    "buckets",
    "parallel_megatron",
    "reduce_case",
    "shards",
    "train_step",
    "wrap",
]
