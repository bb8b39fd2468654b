"""What is said once about a model when LoCo has found its buckets: what is compressed, what not, and what it costs."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from megatron_loco.collectives.scratch import ScratchPool
from megatron_loco.collectives.state import BucketState
from megatron_loco.config import LoCoConfig

logger = logging.getLogger(__name__)


@dataclass
class Attached:
    """What ``GradSync.attach`` found in one model.

    Attributes:
        names: Parameter -> its name.
        states: Of the buckets that are compressed.
        small: Buckets that are not, since they are small.
        num_of_one_rank: Buckets that belong to one rank alone.
        topologies: A line for the log about each group whose first rank this is.
        scratch: Pool -> kind of bucket groups -> sizes in bytes of the buffers that each of them takes.
    """

    names: dict[Any, str]
    states: list[BucketState] = field(default_factory=list)
    small: list[Any] = field(default_factory=list)
    num_of_one_rank: int = 0
    topologies: list[str] = field(default_factory=list)
    scratch: dict[ScratchPool, dict[str, list[list[int]]]] = field(default_factory=dict)


def num_gradients(bucket: Any) -> int:
    """Elements of a bucket without Megatron's padding: from the shapes of its parameters, equal on all ranks."""
    return sum(param.numel() for param in bucket.params_list)


def report(attached: Attached, ddp_config: Any, config: LoCoConfig) -> None:
    """Log it, on rank 0; the topology of each group on the group's first rank."""
    for topology in attached.topologies:
        logger.info("LoCo: %s", topology)
    if dist.get_rank() != 0:
        return
    if attached.num_of_one_rank:
        logger.info("LoCo: %d bucket(s) belong to one rank alone and are left unchanged", attached.num_of_one_rank)
    if attached.small:
        logger.info(
            "LoCo: %d bucket(s) with fewer than %d gradient elements (%d together) reduce exactly; see "
            "--loco-min-bucket-numel",
            len(attached.small),
            config.min_bucket_numel,
            sum(map(num_gradients, attached.small)),
        )
    if ddp_config.num_distributed_optimizer_instances > 1:
        logger.info(
            "LoCo: compresses inside each of %d optimizer instances; the all-reduce across them is Megatron's own, and "
            "counted as such",
            ddp_config.num_distributed_optimizer_instances,
        )
    states = attached.states
    if not states:
        logger.warning("LoCo: nothing to compress on rank 0")
        return
    numel = sum(state.exchange.numel for state in states)
    wire_bits = sum(s.layout.send_bytes for s in states) * 8 / sum(s.layout.numel for s in states)
    logger.info(
        "LoCo: %d bucket(s), %d gradient elements at %.2f bits each (%s backend, at most %d chunk(s)); the first %d "
        "steps are exact",
        len(states),
        numel,
        wire_bits,
        states[0].backend.name,
        max(state.exchange.num_chunks for state in states),
        config.warmup_steps,
    )
    error_bytes = sum(state.memory_bytes for state in states)
    scratch_bytes = sum(pool.allocated_bytes for pool in attached.scratch)
    logger.info(
        "LoCo: memory on this rank: error state %.2f MB, scratch %.2f MB; together %.2f bytes per gradient element",
        error_bytes / 1e6,
        scratch_bytes / 1e6,
        (error_bytes + scratch_bytes) / numel,
    )
