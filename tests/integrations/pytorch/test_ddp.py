"""The DDP hook on real Gloo ranks: bitwise DDP's own gradients with the identity codec, rebuilt buckets, restarts."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import megatron_loco.ddp
from megatron_loco import LoCoConfig
from tests.integrations.pytorch._models import Layers, TinyLM, token_batch, whole_batch
from tests.integrations.pytorch.conftest import Run

IDENTITY = LoCoConfig(bits=32, warmup_steps=1, min_bucket_numel=0)
FOUR_BITS = LoCoConfig(bits=4, warmup_steps=2, min_bucket_numel=0)
SEVERAL_BUCKETS = {"bucket_cap_mb": 0.004}
"""Of about a thousand elements; the first holds the rest of a megabyte, until torch rebuilds them."""

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "one bucket": {"bucket_cap_mb": 25},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
    "gradients in buckets": {"gradient_as_bucket_view": True},
}


def _gradients(
    config: LoCoConfig | None, group: dist.ProcessGroup, *, skip: int | None = None, accumulate: int = 1, **options: Any
) -> tuple[list[Tensor], list[int], int]:
    torch.manual_seed(0)
    layers = Layers(whole=True)
    model = DistributedDataParallel(layers, **{**SEVERAL_BUCKETS, **options})
    state = megatron_loco.ddp.apply(model, config) if config else None
    found = []
    for step in range(4):
        for micro_batch in range(accumulate):
            last = micro_batch == accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                # A multiple of all divisors (1 to 4 ranks): means are whole numbers too.
                (12 * model(whole_batch(10 * step + micro_batch, group.rank()), skip=skip).sum()).backward()
        found += [param.grad.clone() for param in layers.parameters() if param.grad is not None]
        model.zero_grad()
    steps = [] if state is None else [each.step for each in state.states]
    return found, steps, 0 if state is None else state.model_states.exact_traffic.exact_steps


def _identity_is_stock(group: dist.ProcessGroup) -> list[str]:
    wrong = []
    for name, options in OPTIONS.items():
        # torch itself fails with a static graph whose first pass is not synchronised.
        for accumulate in (1,) if "static_graph" in options else (1, 3):
            skip = 1 if "find_unused_parameters" in options else None
            stock, _, _ = _gradients(None, group, skip=skip, accumulate=accumulate, **options)
            ours, steps, _ = _gradients(IDENTITY, group, skip=skip, accumulate=accumulate, **options)
            equal = len(ours) == len(stock) and all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True))
            if not equal or not any(bool(gradient.any()) for gradient in stock):
                wrong.append(f"{name}, {accumulate} micro-batches: other gradients")
            if group.size() > 1 and set(steps) != {4}:
                wrong.append(f"{name}, {accumulate} micro-batches: steps {steps}")
    return wrong


@pytest.mark.kind(13, 22, 29)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_identity_is_bitwise_stock(run: Run, size: int) -> None:
    assert run(size, _identity_is_stock) == [[]] * size


def _small_buckets(group: dist.ProcessGroup) -> tuple[bool, list[int], int]:
    config = dataclasses.replace(IDENTITY, min_bucket_numel=10**6)
    stock, _, _ = _gradients(None, group)
    ours, steps, exact = _gradients(config, group)
    return all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True)), steps, exact


def test_small_buckets_are_exact_and_counted(run: Run) -> None:
    (same, steps, exact), _ = run(2, _small_buckets)
    assert same
    assert steps == []
    # One bucket in the first pass, then several; two ring passes each.
    assert exact >= 2 * (1 + 3 * 2)


def _train(
    group: dist.ProcessGroup,
    steps: range,
    config: LoCoConfig | megatron_loco.ddp.LoCoState,
    *,
    weights: dict[str, Tensor] | None = None,
    saved: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[TinyLM, megatron_loco.ddp.LoCoState]:
    torch.manual_seed(0)
    module = TinyLM()
    if weights is not None:
        module.load_state_dict(weights)
    model = DistributedDataParallel(module, **{**SEVERAL_BUCKETS, **options})
    state = megatron_loco.ddp.apply(model, config)
    if saved is not None:
        state.load_state_dict(saved)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        model(token_batch(step, group.rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module, state


def _equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def _resume(group: dist.ProcessGroup) -> dict[str, Any]:
    straight, state = _train(group, range(10), FOUR_BITS)
    half, first = _train(group, range(5), FOUR_BITS)
    weights = copy.deepcopy(half.state_dict())
    saved = pickle.loads(pickle.dumps(first.state_dict()))
    resumed, again = _train(group, range(5, 10), FOUR_BITS, weights=weights, saved=saved)
    pickled, _ = _train(group, range(5, 10), pickle.loads(pickle.dumps(first)), weights=weights)
    # No pass in between: what was loaded is what is saved.
    _, waiting = _train(group, range(5, 5), FOUR_BITS, weights=weights, saved=saved)
    twice, _ = _train(group, range(5, 10), FOUR_BITS, weights=weights, saved=waiting.state_dict())
    without, _ = _train(group, range(5, 10), FOUR_BITS, weights=weights)
    first_buckets = [bucket.names for bucket in _train(group, range(1), FOUR_BITS)[1].state_dict()["buckets"]]
    return {
        "straight": _equal(resumed, straight),
        "pickled": _equal(pickled, straight),
        "saved before a pass": _equal(twice, straight),
        "without": _equal(without, straight),
        "rebuilt": first_buckets != [bucket.names for bucket in saved["buckets"]],
        "steps": {each.step for each in (*state.states, *again.states)},
    }


@pytest.mark.kind(9, 27)
@pytest.mark.parametrize("size", [2, 3])
def test_resume_is_bitwise_although_torch_rebuilds_its_buckets(run: Run, size: int) -> None:
    for found in run(size, _resume):
        assert found == {
            "straight": True,
            "pickled": True,
            "saved before a pass": True,
            "without": False,  # else the error state makes no difference, and this test shows nothing
            "rebuilt": True,
            "steps": {10},
        }


def _replicas(group: dist.ProcessGroup, gather_dtype: torch.dtype | None) -> tuple[bool, float, float]:
    state = megatron_loco.ddp.LoCoState(FOUR_BITS, gather_dtype=gather_dtype)
    module, _ = _train(group, range(6), state)
    mine = torch.cat([param.detach().flatten() for param in module.parameters()])
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    traffic = state.model_states.traffic
    return all(torch.equal(theirs, mine) for theirs in everyone), traffic.sent_bytes, traffic.bf16_bytes


@pytest.mark.kind(23)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_replicas_stay_bitwise_equal(run: Run, size: int) -> None:
    in_fp32, in_bf16 = (run(size, _replicas, dtype)[0] for dtype in (None, torch.bfloat16))
    assert in_fp32[0]
    assert in_bf16[0]
    # Two exact steps, the first in buckets that were rebuilt, and four whose gather moves half in bf16.
    numel = sum(param.numel() for param in TinyLM().parameters())
    gathered = 4 * numel * (size - 1) / size
    exact = 2 * 2 * 4 * numel * (size - 1) / size
    assert in_fp32[1] > exact + 4 * gathered
    # Shards are padded to one element more at most in each of a few buckets.
    assert in_fp32[1] - in_bf16[1] == pytest.approx(2 * gathered, rel=0.01)


def _elsewhere(group: dist.ProcessGroup, saved: list[dict[str, Any]]) -> tuple[set[int], bool]:
    mine = saved[group.rank()]
    _, state = _train(group, range(5, 6), FOUR_BITS, saved=mine)
    wrong_rank = False
    if group.size() == mine["world_size"]:
        try:
            state.load_state_dict(saved[1 - group.rank()])
        except ValueError:
            wrong_rank = True
    return {each.step for each in state.states}, wrong_rank


def _state_after_five(group: dist.ProcessGroup) -> dict[str, Any]:
    return _train(group, range(5), FOUR_BITS)[1].state_dict()


@pytest.mark.kind(6)
def test_another_number_of_ranks_starts_with_zero_error_and_keeps_the_step(run: Run) -> None:
    saved = run(2, _state_after_five)
    assert run(3, _elsewhere, [*saved, saved[0]]) == [({6}, False)] * 3
    assert run(2, _elsewhere, saved) == [({6}, True)] * 2


def _other_blocks(group: dist.ProcessGroup) -> tuple[set[int], list[str]]:
    saved = _state_after_five(group)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_loco").addHandler(handler)
    _, state = _train(group, range(5, 6), dataclasses.replace(FOUR_BITS, block_size=64), saved=saved)
    logging.getLogger("megatron_loco").removeHandler(handler)
    return {each.step for each in state.states}, [text for text in messages if "starts at zero" in text]


def test_an_error_in_other_blocks_is_dropped_with_a_warning(run: Run) -> None:
    (steps, first), (_, second) = run(2, _other_blocks)
    assert steps == {6}
    assert first
    assert not second


def _other_parameters(group: dist.ProcessGroup, saved: dict[str, Any]) -> bool:
    stock, _, _ = _gradients(None, group)
    torch.manual_seed(0)
    layers = Layers(whole=True)
    model = DistributedDataParallel(layers, **SEVERAL_BUCKETS)
    state = megatron_loco.ddp.apply(model, IDENTITY)
    state.load_state_dict({**saved, "rank": group.rank()})
    (12 * model(whole_batch(0, group.rank())).sum()).backward()
    return all(torch.equal(p.grad, g) for p, g in zip(layers.parameters(), stock, strict=False) if p.grad is not None)


def test_a_state_of_other_parameters_is_dropped(run: Run) -> None:
    saved = run(2, _state_after_five)[0]
    assert run(2, _other_parameters, saved) == [True] * 2


def _damaged(group: dist.ProcessGroup) -> str:
    saved = copy.deepcopy(_state_after_five(group))
    if group.rank() == 0:
        return _message(group, saved)
    bucket = next(bucket for bucket in saved["buckets"] if bucket.error)
    next(iter(bucket.error.values())).view(torch.uint8).flatten()[3] ^= 64
    return _message(group, saved)


def _message(group: dist.ProcessGroup, saved: dict[str, Any]) -> str:
    try:
        _train(group, range(5, 6), FOUR_BITS, saved=saved)
    except ValueError as error:
        return str(error)
    return ""


def test_a_damaged_state_stops_every_rank(run: Run) -> None:
    first, second = run(2, _damaged)
    assert "another rank's" in first
    assert "bucket of " in second
    assert "load_error='never'" in second


def _refusals(group: dist.ProcessGroup) -> list[str]:
    found = []
    for module, config in (
        (nn.Embedding(8, 4, sparse=True), FOUR_BITS),
        (Layers(), LoCoConfig(bits=4 if group.rank() else 8)),
    ):
        try:
            megatron_loco.ddp.apply(DistributedDataParallel(module), config)
        except ValueError as error:
            found.append(str(error))
    return found


@pytest.mark.kind(21)
def test_refusals(run: Run) -> None:
    for sparse, differing in run(2, _refusals):
        assert "sparse=False" in sparse
        assert "--loco-bits: 8 on rank 0, 4 on rank 1" in differing


def _scaled(group: dist.ProcessGroup, scales: list[float]) -> list[Tensor]:
    # A gradient scaler multiplies the loss; LoCo is told by how much, and sends the same codes.
    torch.manual_seed(0)
    module = TinyLM()
    model = DistributedDataParallel(module)
    scale = torch.ones(())
    config = LoCoConfig(bits=4, warmup_steps=0, min_bucket_numel=0, error_bits=32)
    megatron_loco.ddp.apply(model, megatron_loco.ddp.LoCoState(config, gradient_scale=lambda: scale))
    found = []
    for step, value in enumerate(scales):
        scale = torch.tensor(value)
        (model(token_batch(step, group.rank())) * scale).backward()
        found += [param.grad / scale for param in module.parameters() if param.grad is not None]
        model.zero_grad()
    return found


@pytest.mark.kind(1)
def test_the_error_follows_the_gradient_scale(run: Run) -> None:
    # Powers of two change no bit of mantissas.
    plain = run(2, _scaled, [1.0, 1.0, 1.0])[0]
    scaled = run(2, _scaled, [1024.0, 64.0, 4096.0])[0]
    assert all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True))
