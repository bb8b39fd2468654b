"""From a Megatron optimizer to its models and their bucket states."""

from __future__ import annotations

from typing import Any

from megatron_loco.collectives.state import BucketState


def leaf_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers that hold parameters.

    A ``ChainedOptimizer`` has others: for dense parameters, for experts, for each chunk of a pipeline stage.
    """
    inner = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if inner is None else [leaf for each in inner for leaf in leaf_optimizers(each)]


def models_of(optimizer: Any) -> list[Any]:
    """The ``DistributedDataParallel`` models that it updates, each once; none if all its parameters are frozen."""
    models = {id(m): m for leaf in leaf_optimizers(optimizer) for m in getattr(leaf, "model_chunks", ())}
    return list(models.values())


def bucket_groups_of(model: Any) -> list[Any]:
    """The bucket groups of a model, those of experts last."""
    return [
        bucket_group
        for kind in ("bucket_groups", "expert_parallel_bucket_groups")
        for bucket_group in getattr(model, kind, ())
    ]


def states_of(optimizer: Any) -> list[BucketState]:
    """This rank's states of all buckets that it updates, in a fixed order; not those of other models in this process.

    By way of its models: it partitions their buckets into groups of its own, which have no states.
    """
    return [
        state
        for model in models_of(optimizer)
        for bucket_group in bucket_groups_of(model)
        for _, state in getattr(bucket_group, "loco_states", ())
    ]
