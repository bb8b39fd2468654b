"""The entry ``loco`` in the content metadata of a checkpoint: what it says, and what follows from it on loading."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_loco import __version__
from megatron_loco.collectives.saved_state import column_names, world_facts
from megatron_loco.collectives.state import BucketState
from megatron_loco.config import LoCoConfig, flag
from megatron_loco.integrations.megatron.differences import gradient_spans
from megatron_loco.integrations.megatron.optimizers import bucket_groups_of, models_of, states_of

FORMAT = 1
ENTRY = "loco"
"""Its name in the content metadata and in the state dict, and the first part of every key."""

# Settings that change what an error means, and those that may change from one step to the next.
_LAYOUT_SETTINGS = ("block_size", "error_bits", "exact_params", "min_bucket_numel", "topology", "ranks_per_node")
_FREE_SETTINGS = ("bits", "scale_mode", "fixed_inverse_scale", "beta", "reset_interval", "warmup_steps", "rollback")


@dataclass(frozen=True)
class Plan:
    """What a load does with the states of this rank.

    Attributes:
        states: They get the checkpoint's error and counters, unless ``zero_because`` says why not.
        step: Step counter to go on from with zero error.
        zero_because: Why the error starts at zero; empty if it is loaded.
        columns: Names of the columns of the saved counters.
        changed_settings: What else is different from the run that saved, for a message.
    """

    states: Sequence[BucketState]
    step: int = 0
    zero_because: str = ""
    columns: Sequence[str] = ()
    changed_settings: str = ""


def make_plan(saved: Mapping[str, Any] | None, optimizer: Any, config: LoCoConfig) -> Plan:
    """Decide, alike on all ranks, what to do with the entry of a checkpoint. A collective over all ranks.

    Args:
        saved: The entry, or ``None`` if the checkpoint has none.
        optimizer: Megatron's, or ``None`` if its state is not loaded.
        config: Settings of this run.
    """
    if optimizer is None:
        return Plan((), zero_because="the optimizer state is not loaded (--finetune, --no-load-optim, or not saved)")
    states = states_of(optimizer)
    if saved is None:
        return Plan(states, zero_because="the checkpoint was written without LoCo")
    step = saved.get("step", 0)
    if saved.get("format") != FORMAT:
        reason = (
            f"the checkpoint's entry has format {saved.get('format')!r} (megatron_loco {saved.get('version')}), this "
            f"version reads format {FORMAT}"
        )
        return Plan(states, step if isinstance(step, int) else 0, reason)
    mine = describe(states, optimizer, config)
    if config.load_error == "never":
        return Plan(states, step, "--loco-load-error never")
    if not saved["has_error"]:
        return Plan(states, step, "the checkpoint was written with --loco-save-error never")
    if saved["layouts"] != mine["layouts"]:
        return Plan(states, step, f"the checkpoint has another layout ({_layout_differences(saved, mine)})")
    changed = _changed_settings(saved, mine, _FREE_SETTINGS)
    return Plan(states, step, columns=saved["columns"], changed_settings=", ".join(changed))


def describe(states: Sequence[BucketState], optimizer: Any, config: LoCoConfig) -> dict[str, Any]:
    """Return the entry for a checkpoint: plain values, equal on all ranks. A collective over all ranks."""
    from megatron.core import parallel_state as mpu

    everyone = dist.group.WORLD
    assert everyone is not None
    sizes = {
        "world size": everyone.size(),
        "tensor parallel size": mpu.get_tensor_model_parallel_world_size(),
        "pipeline parallel size": mpu.get_pipeline_model_parallel_world_size(),
        "context parallel size": mpu.get_context_parallel_world_size(),
        "expert parallel size": mpu.get_expert_model_parallel_world_size(),
        "data parallel size": mpu.get_data_parallel_world_size(),
    }
    position = [
        everyone.rank(),
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_pipeline_model_parallel_rank(),
        mpu.get_context_parallel_rank(),
        mpu.get_expert_model_parallel_rank(),
        mpu.get_expert_tensor_parallel_rank(),
        mpu.get_data_parallel_rank(with_context_parallel=True),
        mpu.get_expert_data_parallel_rank(),
        [_meaning(model) for model in models_of(optimizer)],
    ]
    facts = world_facts(states, position, everyone)
    return {
        "format": FORMAT,
        "version": __version__,
        "has_error": config.save_error == "always",
        "step": facts.step,
        "layouts": facts.digest,
        "num_buckets": facts.num_states,
        "error_bytes": facts.error_bytes,
        "columns": column_names(),
        "sizes": sizes,
        "settings": dataclasses.asdict(config),
    }


def _meaning(model: Any) -> list[Any]:
    # What the buckets of a model hold, and what gradients are multiplied by beside the unit of a state: errors of equal
    # shape, but of parameters in another order or of another scale, would otherwise pass for this run's.
    names = {param: name for name, param in model.module.named_parameters()}
    return [
        [model.ddp_config.average_in_collective, model.config.calculate_per_token_loss],
        [
            [bucket.gradient_scaling_factor, [[names[p], start] for p, (start, _) in gradient_spans(bucket).items()]]
            for bucket_group in bucket_groups_of(model)
            for bucket in bucket_group.buckets
        ],
    ]


def _layout_differences(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    found = [
        f"{name} {saved['sizes'][name]} -> {size}"
        for name, size in mine["sizes"].items()
        if saved["sizes"].get(name, size) != size
    ]
    found += _changed_settings(saved, mine, (*_LAYOUT_SETTINGS, "bits"))
    if not found:
        for name in ("num_buckets", "error_bytes"):
            if saved[name] != mine[name]:
                found.append(f"{name.replace('_', ' ')} {saved[name]} -> {mine[name]}")
    return ", ".join(found) or "order of ranks, scale of gradients, or names, sizes or order of parameters"


def _changed_settings(saved: Mapping[str, Any], mine: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    then, now = saved["settings"], mine["settings"]
    return [f"{flag(name)} {then[name]} -> {now[name]}" for name in names if then.get(name, now[name]) != now[name]]
