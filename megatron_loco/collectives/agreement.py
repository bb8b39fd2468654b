"""Start-up check that all ranks of a group mean the same: a difference would hang or silently spoil an exchange."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist

from megatron_loco import __version__
from megatron_loco.config import LoCoConfig, flag


def settings_facts(config: LoCoConfig | None) -> dict[str, object]:
    """What ranks that train together must have in common, whatever their buckets; ``None`` is LoCo off."""
    if config is None:
        return {"LoCo": "off"}
    settings = {flag(name): value for name, value in dataclasses.asdict(config).items()}
    return {"LoCo": "on", "version of megatron_loco": __version__} | settings


def check_agreement(facts: Mapping[str, object], group: dist.ProcessGroup) -> None:
    """Compare ``facts`` over all ranks of ``group``. A collective: every rank of the group must call it.

    Where all agree it costs one all-gather of eight bytes. Megatron's fake process group, which delivers nothing, is
    passed over.

    Args:
        facts: Names and values that have to be equal; picklable, and equal values have an equal ``repr``.
        group: The ranks.

    Raises:
        ValueError: on every rank, if any name or value differs; the message says which, and who has what.
    """
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return
    digest = int.from_bytes(hashlib.sha256(repr(list(facts.items())).encode()).digest()[:7], "little")
    mine = torch.tensor([digest], dtype=torch.int64, device=group_device(group))
    digests = mine.new_empty(group.size())
    dist.all_gather_into_tensor(digests, mine, group=group)
    if bool((digests == digests[0]).all()):
        return
    everyone: list[dict[str, object] | None] = [None] * group.size()
    dist.all_gather_object(everyone, dict(facts), group=group)
    members = dist.get_process_group_ranks(group)
    problems = _differences({member: theirs or {} for member, theirs in zip(members, everyone, strict=True)})
    if problems:
        raise ValueError("LoCo: ranks that train together disagree:\n  " + "\n  ".join(problems))


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Where the tensors of a group's collectives live: the CPU for Gloo, else this rank's accelerator."""
    if dist.get_backend(group) == "gloo" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _differences(held: Mapping[int, Mapping[str, object]]) -> list[str]:
    first_rank, first = next(iter(held.items()))
    different, missing = [], []
    for name in dict.fromkeys(name for theirs in held.values() for name in theirs):
        for rank, theirs in held.items():
            if name not in theirs or name not in first:
                without = first_rank if name not in first else rank
                missing.append(f"{name}: unknown on rank {without}")
            elif theirs[name] != first[name]:
                different.append(f"{name}: {first[name]!r} on rank {first_rank}, {theirs[name]!r} on rank {rank}")
            else:
                continue
            break
    # A rank where LoCo is off lacks all settings, and one with fewer buckets some layouts: the cause alone is enough.
    return different or missing
