"""Start-up check that a back end's collectives do what LoCo relies on: a wrong sum or a shifted byte shows as a worse
loss, days later."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_loco.collectives.agreement import group_device

_SHARD = 3


@torch.no_grad()
def check_collectives(group: dist.ProcessGroup, *, average: bool) -> None:
    """Run the collectives of a reduction on a few bytes and compare. A collective: every rank of ``group`` must call.

    Checked: ``reduce_scatter_tensor`` with ``SUM`` and, if asked for, ``AVG`` (the mean), and ``all_to_all_single``
    with pieces of different sizes and of none. Four collectives of at most 12 bytes per pair of ranks; Megatron's fake
    process group, which delivers nothing, is passed over.

    Args:
        group: The ranks.
        average: Whether the run averages in the collective; a back end without ``AVG`` is fine otherwise.

    Raises:
        RuntimeError: on every rank of the group, if one got a wrong result; names the back end and torch.
    """
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return
    device = group_device(group)
    wrong = [
        name
        for name, is_right in (
            ("reduce_scatter_tensor(SUM)", _sums(group, device)),
            ("reduce_scatter_tensor(AVG)", not average or _averages(group, device)),
            ("all_to_all_single", _delivers(group, device)),
        )
        if not is_right
    ]
    outcome = torch.tensor([bool(wrong)], dtype=torch.int64, device=device)
    outcomes = outcome.new_empty(group.size())
    dist.all_gather_into_tensor(outcomes, outcome, group=group)
    if bool(outcomes.any()):
        members = dist.get_process_group_ranks(group)
        failed = [rank for rank, fails in zip(members, outcomes.tolist(), strict=True) if fails]
        here = f"; here: {', '.join(wrong)}" if wrong else ""
        raise RuntimeError(
            f"LoCo: collectives of the {dist.get_backend(group)} backend of torch {torch.__version__} return wrong "
            f"results on ranks {failed}{here}. LoCo cannot work on it, and neither can Megatron's own reduction; use "
            "another release of torch or of the backend"
        )


def _weight(rank: int) -> int:
    return rank % 3 + 1


def _shards(weight: int, world_size: int) -> torch.Tensor:
    # Small whole numbers: the sum is exact in fp32, in any order. Neighbouring shards differ, as do most ranks.
    return (torch.arange(world_size * _SHARD) % 8 + 1).to(torch.float32) * weight


def _expected_sum(group: dist.ProcessGroup) -> torch.Tensor:
    total = _shards(sum(map(_weight, range(group.size()))), group.size())
    return total.view(group.size(), _SHARD)[group.rank()]


def _sums(group: dist.ProcessGroup, device: torch.device) -> bool:
    output = torch.full((_SHARD,), torch.nan, device=device)
    dist.reduce_scatter_tensor(output, _shards(_weight(group.rank()), group.size()).to(device), group=group)
    return torch.equal(output.cpu(), _expected_sum(group))


def _averages(group: dist.ProcessGroup, device: torch.device) -> bool:
    output = torch.full((_SHARD,), torch.nan, device=device)
    dist.reduce_scatter_tensor(
        output, _shards(_weight(group.rank()), group.size()).to(device), op=dist.ReduceOp.AVG, group=group
    )
    # Divided before or after the sum: the roundings of world_size terms differ, and a missing division is a factor.
    return torch.allclose(output.cpu(), _expected_sum(group) / group.size(), rtol=1e-4, atol=1e-6)


def _delivers(group: dist.ProcessGroup, device: torch.device) -> bool:
    rank, world_size = group.rank(), group.size()
    send = [_message(rank, other) for other in range(world_size)]
    expected = [_message(other, rank) for other in range(world_size)]
    received = torch.full((sum(map(len, expected)),), 255, dtype=torch.uint8, device=device)
    dist.all_to_all_single(
        received,
        torch.tensor([byte for message in send for byte in message], dtype=torch.uint8, device=device),
        output_split_sizes=[len(message) for message in expected],
        input_split_sizes=[len(message) for message in send],
        group=group,
    )
    return received.tolist() == [byte for message in expected for byte in message]


def _message(sender: int, receiver: int) -> list[int]:
    # None, one, two or three bytes; which, and their values, tell sender and receiver.
    return [(17 * sender + 31 * receiver + position) % 251 for position in range((sender + 2 * receiver) % 4)]
