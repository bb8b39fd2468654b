"""Sizes, dtypes, padding and identity of buckets under Megatron's DDP, each against a one-process model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loco.config import LoCoConfig
from tests._ranks import RankPool
from tests.bugs._models import Expected, Gradient, buckets, shards, states, step, wrap
from tests.integrations.megatron._ddp import parallel_megatron

RanksOf = Callable[[int], RankPool]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def config(block_size: int = 32, **settings: Any) -> LoCoConfig:
    return LoCoConfig(
        **{"bits": 4, "block_size": block_size, "warmup_steps": 0, "min_bucket_numel": 0, "reset_interval": 0}
        | settings
    )


def loco(stack: ExitStack, settings: LoCoConfig) -> None:
    """Megatron's groups and LoCo, until ``stack`` closes."""
    parallel_megatron(stack)
    from megatron_loco.integrations.megatron import patch

    stack.enter_context(patch(settings))


def normal(ddp: Any, seed: int) -> Gradient:
    """Gradients that differ by step, rank and parameter."""
    numels = [weight.numel() for weight in ddp.module.weights]

    def gradient(rank: int, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(10_000 * seed + 100 * rank + number)
        return torch.randn(numels[number], generator=generator)

    return gradient


# ------------------------------------------------------------------------------------------- sizes (kind 17)


def _sizes(group: dist.ProcessGroup) -> None:
    rank = group.rank()
    for block_size in (32, 128, 256):
        with ExitStack() as stack:
            loco(stack, config(block_size))
            for numel in (1, 2, 127, 128, 384, 1021, 4096 + 128):
                ddp = wrap([(1, numel)])
                expected = Expected(ddp, config(block_size))
                for number in range(2):
                    gradient = normal(ddp, number)
                    for mine, right in zip(step(ddp, rank, gradient), expected.shards(rank, gradient), strict=True):
                        assert torch.equal(mine, right), (block_size, numel, number)
                # Compressed, and not by a silent fallback.
                assert [s.traffic.compressed_steps for s in states(ddp)] == [2] * (group.size() > 1)


@pytest.mark.kind(17)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_number_of_elements(ranks_of: RanksOf, world_size: int) -> None:
    ranks_of(world_size).run(_sizes, world_size)


# ------------------------------------------------------------------------------------------ dtypes (kind 25)

SHAPES = ((33, 20), (), (5,), (3, 7, 11), (1, 1), (64, 2))


def _dtypes(group: dist.ProcessGroup) -> None:
    rank = group.rank()
    of_one = [[dtype] * len(SHAPES) for dtype in (FP32, BF16, FP16)]
    mixed = [[FP32 if number == odd else BF16 for number in range(len(SHAPES))] for odd in (0, 1, 5)]
    with ExitStack() as stack:
        loco(stack, config())
        for dtypes, in_fp32, overlap, one_group in itertools.product(
            [*of_one, *mixed], (True, False), (False, True), (False, True)
        ):
            ddp = wrap(SHAPES, dtypes=dtypes, reduce_in_fp32=in_fp32, overlap=overlap, one_group=one_group)
            wanted = {FP32} if in_fp32 else set(dtypes)
            assert {bucket.grad_data.dtype for bucket in buckets(ddp)} == wanted
            expected = Expected(ddp, config())
            for number in range(2):
                gradient = normal(ddp, number)
                for mine, right in zip(step(ddp, rank, gradient), expected.shards(rank, gradient), strict=True):
                    assert mine.dtype == right.dtype
                    assert torch.equal(mine, right), (dtypes, in_fp32, overlap, one_group, number)
            for state in states(ddp):
                assert (state.error.codes.dtype, state.error.scales.dtype) == (torch.int8, FP32)
            assert len(states(ddp)) == len(buckets(ddp))


@pytest.mark.kind(25)
def test_dtypes_of_parameters_and_gradients(ranks_of: RanksOf) -> None:
    ranks_of(2).run(_dtypes, 2)


def _two_buffers(group: dist.ProcessGroup) -> tuple[list[str], str]:
    # Parameters of two dtypes are two buffers, and Megatron numbers the buckets of each from 0.
    with ExitStack() as stack:
        loco(stack, config())
        names = [state.name for state in states(wrap([(64, 2), (128, 2)], dtypes=[BF16, FP32]))]
        for different in (0, 1):
            shapes = [(64, 2), (128, 2)]
            if group.rank() == 1:
                shapes[different] = (63, 2)
            with pytest.raises(ValueError) as refused:
                wrap(shapes, dtypes=[BF16, FP32])
    return names, str(refused.value)


@pytest.mark.kind(25, 21)
def test_buckets_of_two_dtypes_are_told_apart(ranks_of: RanksOf) -> None:
    for names, message in ranks_of(2).run(_two_buffers, 2):
        assert len(set(names)) == 2, names
        assert "rank 1" in message


# ----------------------------------------------------------------------------------------- padding (kind 31)


def _padding(group: dist.ProcessGroup) -> None:
    rank = group.rank()
    shapes = [(33, 1), (7,), (3, 32)]
    with ExitStack() as stack:
        loco(stack, config())
        clean, poisoned = wrap(shapes), wrap(shapes)
        (bucket,) = buckets(poisoned)
        covered = torch.zeros(bucket.grad_data.numel(), dtype=torch.bool)
        for start, stop in bucket.param_to_index.values():
            covered[start:stop] = True
        assert not covered.all()

        def poison() -> None:
            bucket.grad_data[~covered] = math.nan

        for number in range(3):
            gradient = normal(clean, number)
            (right,) = step(clean, rank, gradient)
            (mine,) = step(poisoned, rank, gradient, prepare=poison)
            assert torch.equal(mine, right)
            assert mine.isfinite().all()
        ((mine_state,), (right_state,)) = states(poisoned), states(clean)
        for name, tensor in mine_state.error.tensors().items():
            assert torch.equal(tensor, right_state.error.tensors()[name])


@pytest.mark.kind(31)
@pytest.mark.parametrize("world_size", [2, 3])
def test_nan_in_the_padding_of_a_bucket(ranks_of: RanksOf, world_size: int) -> None:
    ranks_of(world_size).run(_padding, world_size)


# --------------------------------------------------------------------------------- whose error it is (kind 9)


def _equal_buckets(group: dist.ProcessGroup) -> None:
    # Six equal matrices, a bucket each: nothing but identity tells them apart.
    rank = group.rank()
    with ExitStack() as stack:
        loco(stack, config())
        ddp = wrap([(16, 8)] * 6, overlap=True, bucket_size=128)
        assert len(buckets(ddp)) == 6
        assert len({bucket.grad_data.numel() for bucket in buckets(ddp)}) == 1
        expected = Expected(ddp, config())
        order = list(range(6))
        for number in range(4):
            gradient = normal(ddp, number)
            right = expected.shards(rank, gradient)
            mine = step(ddp, rank, gradient)
            for position, index in enumerate(order):
                assert torch.equal(mine[position], right[index]), (number, position)
            if number == 1:
                # Other positions, same parameters: the error stays with them.
                ddp.bucket_groups.reverse()
                order.reverse()
                ids = [bucket.bucket_id for bucket in buckets(ddp)]
                for bucket, bucket_id in zip(buckets(ddp), reversed(ids), strict=True):
                    bucket.bucket_id = bucket_id


@pytest.mark.kind(9)
def test_equal_buckets_keep_their_own_error(ranks_of: RanksOf) -> None:
    ranks_of(2).run(_equal_buckets, 2)


def _equal_buckets_of_one_group(group: dist.ProcessGroup) -> None:
    rank = group.rank()
    with ExitStack() as stack:
        loco(stack, config())
        ddp = wrap([(16, 8), (16, 8)], dtypes=[BF16, FP32], one_group=True)
        (bucket_group,) = ddp.bucket_groups
        assert [bucket.grad_data.numel() for bucket in bucket_group.buckets] == [128, 128]
        expected = Expected(ddp, config())
        for number in range(4):
            right = expected.shards(rank, normal(ddp, number))
            mine = step(ddp, rank, normal(ddp, number))
            assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True)), number


@pytest.mark.kind(9)
def test_equal_buckets_of_a_group_keep_their_own_error(ranks_of: RanksOf) -> None:
    ranks_of(2).run(_equal_buckets_of_one_group, 2)


def _second_model(group: dist.ProcessGroup) -> None:
    # Of the same shape in the same process, interleaved, and one wrapped anew in the middle of a run.
    rank = group.rank()
    shapes = [(16, 8), (9,)]
    with ExitStack() as stack:
        loco(stack, config())
        first, second = wrap(shapes), wrap(shapes)
        expected = {ddp: Expected(ddp, config()) for ddp in (first, second)}
        for number in range(3):
            for ddp, seed in ((first, number), (second, 50 - number)):
                gradient = normal(ddp, seed)
                (mine,), (right,) = step(ddp, rank, gradient), expected[ddp].shards(rank, gradient)
                assert torch.equal(mine, right)
        again = wrap(shapes)
        (mine,) = step(again, rank, normal(again, 7))
        (right,) = Expected(again, config()).shards(rank, normal(again, 7))
        assert torch.equal(mine, right)  # no error of an earlier life


@pytest.mark.kind(9)
def test_models_share_no_error(ranks_of: RanksOf) -> None:
    ranks_of(2).run(_second_model, 2)


# ---------------------------------------------------------------------------------- accumulation (kind 22)

NUM_STEPS = 4


def _accumulated(group: dist.ProcessGroup) -> None:
    rank = group.rank()
    shapes = [(33, 20), (11,), (7, 65)]

    def parts(seed: int, count: int) -> list[Gradient]:
        # Whole numbers that add up to the same whole numbers, in any order and without rounding.
        def part(number: int) -> Gradient:
            def gradient(rank: int, index: int) -> Tensor:
                generator = torch.Generator().manual_seed(10_000 * seed + 100 * rank + index)
                numel = math.prod(shapes[index])
                total = torch.randint(-99, 100, (numel,), generator=generator).float()
                others = [torch.randint(-9, 10, (numel,), generator=generator).float() for _ in range(count - 1)]
                return total - sum(others) if number == 0 else others[number - 1]

            return gradient

        return [part(number) for number in range(count)]

    for settings, overlap in itertools.product((config(bits=32), config(reset_interval=3)), (False, True)):
        with ExitStack() as stack:
            loco(stack, settings)
            runs = {}
            for count in (1, 2, 5):
                ddp = wrap(shapes, overlap=overlap)
                results = [step(ddp, rank, *parts(number, count)) for number in range(NUM_STEPS)]
                (state,) = states(ddp)
                # One update of the error and one transfer per step, however many micro-batches it has.
                assert (state.step, state.traffic.compressed_steps) == (NUM_STEPS, NUM_STEPS)
                tensors = [tensor for step_shards in results for tensor in step_shards]
                runs[count] = [*tensors, *(t.clone() for t in state.error.tensors().values())], state.traffic.sent_bytes
            for tensors, sent_bytes in runs.values():
                assert sent_bytes == runs[1][1]
                assert all(torch.equal(mine, right) for mine, right in zip(tensors, runs[1][0], strict=True))


@pytest.mark.kind(22)
def test_micro_batches_make_one_step(ranks_of: RanksOf) -> None:
    ranks_of(2).run(_accumulated, 2)


# ------------------------------------------------------------------------- buckets of one group (kind 15)


def _late(group: dist.ProcessGroup) -> None:
    # One group of two buckets: Megatron waits for its coalescing manager, which holds none of our work.
    rank = group.rank()
    stock_exchange = dist.all_to_all_single
    transfers: list[Any] = []

    def exchange(*args: Any, **kwargs: Any) -> Any:
        if rank == 1 and not transfers:
            dist.recv(torch.zeros(1), group=group, group_src=0)  # rank 0 has looked at its handles
        transfers.append(stock_exchange(*args, **kwargs))
        return transfers[-1]

    with ExitStack() as stack:
        loco(stack, config())
        ddp = wrap([(33, 20), (40, 13)], dtypes=[BF16, FP32], reduce_in_fp32=False, overlap=True, one_group=True)
        assert [len(bucket_group.buckets) for bucket_group in ddp.bucket_groups] == [2]
        expected = Expected(ddp, config())
        for number in range(5):
            gradient = normal(ddp, number)
            right = expected.shards(rank, gradient)
            if number:  # the first batch is dispatched at its end
                transfers.clear()
                with pytest.MonkeyPatch.context() as patching:
                    patching.setattr(dist, "all_to_all_single", exchange)
                    from tests.bugs._models import backward

                    backward(ddp, rank, gradient)
                assert len(transfers) == 2
                if rank == 0:
                    assert not any(transfer.is_completed() for transfer in transfers)
                    dist.send(torch.zeros(1), group=group, group_dst=1)
                ddp.finish_grad_sync()
                mine = shards(ddp)
            else:
                mine = step(ddp, rank, gradient)
            assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True)), number


@pytest.mark.kind(15)
def test_two_buckets_of_a_group_with_a_late_rank(ranks_of: RanksOf) -> None:
    ranks_of(2).run(_late, 2)
