"""The stored error stays in the unit of the gradients: over loss scales, and over token counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loco.config import LoCoConfig
from tests._ranks import RankPool
from tests.integrations.megatron._ddp import buckets, parallel_megatron, shards
from tests.integrations.megatron._steps import Setup, Training, flat_error, same, settings

TOKENS = (1000, 10, 3, 700, 0)
"""Tokens of the global batch in successive steps."""


@pytest.fixture
def two() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def _all_true(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result
        assert all(result.values()), [name for name, value in result.items() if not value]


def _scales(group: dist.ProcessGroup, config: LoCoConfig) -> dict[str, bool]:
    """Runs that differ in their loss scales alone, all powers of two: the same bits once those are divided out."""
    from megatron_loco.integrations.megatron import patch

    result = {}
    with ExitStack() as stack:
        parallel_megatron(stack)
        stack.enter_context(patch(config))

        def run(setup: Setup, changes: dict[int, float]) -> tuple[list[float], list[list[Tensor]], list[Tensor]]:
            training = Training(setup, group.rank())
            outcomes = []
            for seed in range(6):
                if seed in changes:
                    training.set_scale(changes[seed])
                outcomes.append(training.step(seed))
            return [o.scale for o in outcomes], [o.shards + o.weights for o in outcomes], training.errors()

        # Not lower: fp16 would lose bits of the smallest gradients.
        _, expected, expected_errors = run(Setup(constant_scale=2.0**8), {})
        for name, setup, changes, scales in (
            ("growth", Setup(initial_scale=2.0**10, growth_interval=2), {}, [10, 10, 11, 11, 12, 12]),
            ("resume with another scale", Setup(initial_scale=2.0**16), {3: 2.0**15}, [16, 16, 16, 15, 15, 15]),
            ("far apart", Setup(), {1: 2.0**16, 4: 2.0**7}, [12, 16, 16, 16, 7, 7]),
            ("overlapped", Setup(overlap=True), {2: 2.0**14}, [12, 12, 14, 14, 14, 14]),
            ("bf16's constant scale", Setup(fp16=False, constant_scale=2.0**5), {}, [5] * 6),
        ):
            seen, results, errors = run(setup, changes)
            result[f"{name}: scales"] = seen == [2.0**exponent for exponent in scales]
            if setup.fp16:
                result[f"{name}: results"] = all(same(a, b) for a, b in zip(results, expected, strict=True))
                result[f"{name}: errors"] = same(errors, expected_errors)
            else:
                _, unscaled, unscaled_errors = run(Setup(fp16=False), {})
                result[f"{name}: results"] = all(same(a, b) for a, b in zip(results, unscaled, strict=True))
                result[f"{name}: errors"] = same(errors, unscaled_errors)
        result["an error exists"] = any(e.any() for e in expected_errors)
    return result


@pytest.mark.parametrize(
    "config",
    [
        settings(),
        settings(error_bits=16, reset_interval=4),
        settings(error_bits=32, warmup_steps=2),
        settings(error_bits=0, scale_mode="fixed", fixed_inverse_scale=256.0),
    ],
    ids=["8-bit error", "16-bit error, reset", "fp32 error, warm-up", "fixed scale, no error"],
)
def test_the_loss_scale_changes_nothing(two: RankPool, config: LoCoConfig) -> None:
    results = two.run(_scales, 2, config)
    for result in results:
        assert result.pop("an error exists") == config.keeps_error
    _all_true(results)


def _unknown_scale(group: dist.ProcessGroup) -> list[str]:
    from megatron_loco.integrations.megatron import patch

    messages = []
    with ExitStack() as stack:
        parallel_megatron(stack)
        stack.enter_context(patch(settings()))
        training = Training(Setup(), group.rank())
        training.backward(0)
        training.config.grad_scale_func = None
        with pytest.raises(RuntimeError) as caught:
            training.ddp.finish_grad_sync()
        messages.append(str(caught.value))
    return messages


def test_an_unknown_loss_scale_is_an_error(two: RankPool) -> None:
    for (message,) in two.run(_unknown_scale, 2):
        assert "grad_scale_func" in message


def _per_token(
    group: dist.ProcessGroup, config: LoCoConfig, setup: Setup, scales: tuple[float, ...], naive: bool
) -> dict[str, Any]:
    """What was sent and what should have been, summed over steps, per token; and what the error still holds of it."""
    from megatron.core.distributed import finalize_model_grads  # by name, and before the patches

    from megatron_loco.integrations.megatron import patch, units

    del finalize_model_grads
    rank = group.rank()
    with ExitStack() as stack:
        parallel_megatron(stack)
        stack.enter_context(patch(config))
        if naive:
            one = torch.ones(())
            stack.enter_context(mock.patch.object(units.GradientUnit, "of", return_value=one))
        from megatron.core.distributed import finalize_model_grads

        training = Training(setup, rank)
        ((_, bucket),) = buckets(training.ddp)
        (state,) = training.states
        sent = torch.zeros(bucket.grad_data.numel() // 2, dtype=torch.float64)
        wanted = torch.zeros(bucket.grad_data.numel(), dtype=torch.float64)
        rounding = torch.zeros(bucket.grad_data.numel(), dtype=torch.float64)
        for step, (tokens, scale) in enumerate(zip(TOKENS, scales, strict=True)):
            if setup.fp16:
                training.set_scale(scale)
            # Rank 0 has most of them: a sum over its tokens, and so much larger than that of rank 1.
            mine = tokens // 5 if rank else tokens - tokens // 5
            training.backward(step, factor=float(mine))
            wanted += bucket.grad_data.double() / scale / max(tokens, 1)
            count = torch.tensor(mine, dtype=torch.int)
            finalize_model_grads([training.ddp], count)
            sent += shards(training.ddp)[0].double() / scale
            # Stock has counted the same tokens: its tensor holds the global count afterwards.
            assert int(count) == tokens
            assert naive or float(state.unit) == scale * max(tokens, 1)
            if config.error_bits == 8:
                # One storage step, at most what rounding the error to 8 bits moves it by.
                step_size = state.error.scales[:, None].expand_as(state.error.codes) / state.unit
                rounding += flat_error(state, step_size).double()
        return {
            "sent": sent,
            "wanted": wanted,
            "kept": flat_error(state, training.errors()[0]).double(),
            "rounding": rounding,
        }


@pytest.mark.parametrize("error_bits", [8, 32])
@pytest.mark.parametrize("fp16", [False, True], ids=["fp32", "fp16"])
def test_per_token_loss_loses_nothing(two: RankPool, error_bits: int, fp16: bool) -> None:
    config = settings(error_bits=error_bits)
    # With fp16 the loss scale changes at the same time. Not too large: the sums over tokens must fit into fp16.
    scales = (2.0**3, 2.0**4, 2.0**5, 2.0**3, 2.0**2) if fp16 else (1.0,) * 5
    excess = {}
    for naive in (False, True):
        ranks = two.run(_per_token, 2, config, Setup(fp16=fp16, per_token=True), scales, naive)
        # Summed over steps: sent = wanted - (what the error still holds) / (1 - beta), up to the rounding of the stored
        # error. Beside that only fp32 arithmetic: of values up to 0.1, by 2^-24 three times per rank and step.
        sent = torch.cat([r["sent"] for r in ranks])
        expected = sum(r["wanted"] - r["kept"] / (1 - config.beta) for r in ranks)
        bound = sum(r["rounding"] for r in ranks) / (1 - config.beta) + 3 * 2 * len(TOKENS) * 0.1 * 2.0**-24
        excess[naive] = float(((sent - expected).abs() / bound).max())
        assert all(r["kept"].any() for r in ranks)
    assert excess[False] < 1
    # Errors of 1000 tokens added to the gradients of 10 are a hundred times too large.
    assert excess[True] > 10


def _misuse(group: dist.ProcessGroup) -> dict[str, Any]:
    from megatron.core.distributed import finalize_model_grads as bound_before

    from megatron_loco.integrations.megatron import patch

    result = {}
    with ExitStack() as stack:
        parallel_megatron(stack)
        with patch(settings()):
            training = Training(Setup(fp16=False, per_token=True), group.rank())
            training.backward(0)
            with pytest.raises(RuntimeError, match="before finalize_model_grads is imported by name"):
                bound_before([training.ddp], torch.tensor(5, dtype=torch.int))
            with pytest.raises(ValueError, match="overlap_grad_reduce off"):
                Training(Setup(fp16=False, per_token=True, overlap=True), group.rank())
        for config in (settings(error_bits=0), settings(bits=32)):
            with patch(config):
                from megatron.core.distributed import finalize_model_grads

                training = Training(Setup(fp16=False, per_token=True, overlap=True), group.rank())
                for seed in range(3):
                    training.backward(seed)
                    finalize_model_grads([training.ddp], torch.tensor(5, dtype=torch.int))
                    result[f"{config.bits} {config.error_bits} {seed}"] = training.update().updated
        with (
            patch(settings(error_bits=0, scale_mode="fixed")),
            pytest.raises(ValueError, match="overlap_grad_reduce off"),
        ):
            Training(Setup(fp16=False, per_token=True, overlap=True), group.rank())
    return result


def test_per_token_loss_where_tokens_cannot_be_counted_in_time(two: RankPool) -> None:
    _all_true(two.run(_misuse, 2))
