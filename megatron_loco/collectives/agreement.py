"""Start-up check that all ranks of a group mean the same: a difference would hang or silently spoil an exchange."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist


def check_agreement(facts: Mapping[str, object], group: dist.ProcessGroup) -> None:
    """Compare ``facts`` over all ranks of ``group``. A collective: every rank of the group must call it.

    Args:
        facts: Names and values that have to be equal, picklable.
        group: The ranks.

    Raises:
        ValueError: on every rank, if any name or value differs; the message says which, and who has what.
    """
    everyone: list[dict[str, object] | None] = [None] * group.size()
    dist.all_gather_object(everyone, dict(facts), group=group)
    members = dist.get_process_group_ranks(group)
    held = {member: theirs or {} for member, theirs in zip(members, everyone, strict=True)}
    first = held[members[0]]
    problems = []
    for name in dict.fromkeys(name for theirs in held.values() for name in theirs):
        other = next((m for m in members if held[m].get(name) != first.get(name)), None)
        if other is not None:
            problems.append(
                f"{name}: {first.get(name)!r} on rank {members[0]}, {held[other].get(name)!r} on rank {other}"
            )
    if problems:
        raise ValueError("LoCo: ranks that reduce gradients together disagree:\n  " + "\n  ".join(problems))
