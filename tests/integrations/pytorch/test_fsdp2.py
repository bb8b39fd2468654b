"""FSDP2 with LoCo on real Gloo ranks: with the identity codec bitwise torch's own gradients, and checkpoints."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import megatron_loco.fsdp2
from megatron_loco import LoCoConfig
from tests.integrations.pytorch._models import Layers, TinyLM, token_batch, whole_batch
from tests.integrations.pytorch.conftest import Run

IDENTITY = LoCoConfig(bits=32, warmup_steps=1, min_bucket_numel=0)
FOUR_BITS = LoCoConfig(bits=4, warmup_steps=0, min_bucket_numel=0)

POLICIES = {
    "fp32": {},
    "bf16, reduced in fp32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "bf16": {"param_dtype": torch.bfloat16},
}


def _mesh(group: dist.ProcessGroup, shape: tuple[int, ...]) -> DeviceMesh:
    names = ("replicate", "shard")[-len(shape) :]
    return DeviceMesh("cpu", torch.arange(group.size()).view(shape), mesh_dim_names=names)


def _shard(model: nn.Module, units: list[nn.Module], **kwargs: Any) -> None:
    for unit in [*units, model]:
        fully_shard(unit, **kwargs)


def _gradients(
    group: dist.ProcessGroup,
    shape: tuple[int, ...],
    config: LoCoConfig | None,
    *,
    policy: str = "fp32",
    accumulate: int = 1,
    sync_each: bool = True,
    steps: int = 3,
    prepare: Callable[[nn.Module], None] = lambda model: None,
    between: Callable[[nn.Module, int], None] = lambda model, step: None,
    skip: int | None = None,
    **sharding: Any,
) -> tuple[list[Tensor | None], list[int]]:
    # Full gradients of each step, and the steps of the states.
    torch.manual_seed(0)
    model = Layers(whole=True)
    _shard(
        model,
        list(model.layers),
        mesh=_mesh(group, shape),
        mp_policy=MixedPrecisionPolicy(**POLICIES[policy]),
        **sharding,
    )
    prepare(model)
    handle = megatron_loco.fsdp2.apply(model, config) if config else None
    found: list[Tensor | None] = []
    for step in range(steps):
        for micro_batch in range(accumulate):
            model.set_requires_gradient_sync(sync_each or micro_batch == accumulate - 1)
            between(model, step)
            # A multiple of all divisors (1 to 4 ranks): means are whole numbers too.
            loss = 12 * model(whole_batch(10 * step + micro_batch, group.rank()), skip=skip).sum()
            loss.backward()
        found += [None if p.grad is None else p.grad.full_tensor().float() for p in model.parameters()]
        model.zero_grad()
    return found, [] if handle is None else [state.step for state in handle.states]


def _same(ours: list[Tensor | None], stock: list[Tensor | None]) -> bool:
    assert any(gradient is not None and bool(gradient.any()) for gradient in stock)
    return all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(ours, stock, strict=True)
    )


def _identity_is_stock(group: dist.ProcessGroup, shapes: list[tuple[int, ...]]) -> list[str]:
    wrong = []
    for shape in shapes:
        for policy in POLICIES:
            if policy == "bf16" and max(shape) > 2:
                continue  # torch rounds after each of several additions, LoCo after the last
            for accumulate, sync_each in ((1, True), (3, True), (3, False)):
                case = {"policy": policy, "accumulate": accumulate, "sync_each": sync_each}
                stock, _ = _gradients(group, shape, None, **case)
                ours, steps = _gradients(group, shape, IDENTITY, **case)
                expected = 3 * (accumulate if sync_each else 1) if shape[0] > 1 or shape[-1] > 1 else None
                if not _same(ours, stock) or (expected and steps != [expected] * 3):
                    wrong.append(f"{shape} {case}: steps {steps}")
    return wrong


@pytest.mark.kind(9, 22)
@pytest.mark.parametrize(
    ("size", "shapes"), [(1, [(1,)]), (2, [(2,), (2, 1)]), (3, [(3,)]), (4, [(4,), (2, 2), (4, 1)])]
)
def test_identity_is_bitwise_stock(run: Run, size: int, shapes: list[tuple[int, ...]]) -> None:
    assert run(size, _identity_is_stock, shapes) == [[]] * size


def _divisors(group: dist.ProcessGroup, shape: tuple[int, ...]) -> list[bool]:
    def by_six(model: nn.Module) -> None:
        for module in (model, *model.layers):
            module.set_gradient_divide_factor(6.0)
            module.set_force_sum_reduction_for_comms(True)

    def in_sums(model: nn.Module) -> None:
        model.set_force_sum_reduction_for_comms(True)

    stock = [_gradients(group, shape, None, prepare=prepare)[0] for prepare in (by_six, in_sums)]
    ours = [_gradients(group, shape, IDENTITY, prepare=prepare)[0] for prepare in (by_six, in_sums)]
    assert not _same(stock[0], stock[1])
    return [_same(a, b) for a, b in zip(ours, stock, strict=True)]


@pytest.mark.kind(35)
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_divide_factors(run: Run, shape: tuple[int, ...]) -> None:
    assert run(4, _divisors, shape) == [[True, True]] * 4


def _every_second_all_reduce(group: dist.ProcessGroup) -> bool:
    def between(model: nn.Module, step: int) -> None:
        model.set_requires_all_reduce(step % 2 == 1)

    case = {"between": between, "steps": 4}
    stock, _ = _gradients(group, (2, 2), None, **case)
    ours, steps = _gradients(group, (2, 2), IDENTITY, **case)
    assert steps == [2, 2, 2]
    # torch leaves no gradient where it has not reduced between replicas: compare the second of two passes.
    reduced = [index for index in range(len(stock)) if (index // 4) % 2 == 1]
    return _same([ours[i] for i in reduced], [stock[i] for i in reduced])


def test_sums_of_passes_without_all_reduce_are_kept(run: Run) -> None:
    assert run(4, _every_second_all_reduce) == [True] * 4


def _frozen_then_thawed(group: dist.ProcessGroup) -> tuple[bool, list[int]]:
    def between(model: nn.Module, step: int) -> None:
        model.layers[1].weight.requires_grad_(step >= 2)
        model.layers[0].bias.requires_grad_(step < 2)

    stock, _ = _gradients(group, (group.size(),), None, steps=4, between=between)
    ours, steps = _gradients(group, (group.size(),), IDENTITY, steps=4, between=between)
    return _same(ours, stock), sorted(steps)


@pytest.mark.kind(28)
def test_parameters_that_are_frozen_and_thawed(run: Run) -> None:
    # Layer 0 gets a new state at step 2, layer 1 has one from then on, layer 2 counts all.
    assert run(3, _frozen_then_thawed) == [(True, [2, 2, 4])] * 3


def _unused(group: dist.ProcessGroup) -> tuple[bool, list[int]]:
    stock, _ = _gradients(group, (group.size(),), None, skip=0)
    ours, steps = _gradients(group, (group.size(),), IDENTITY, skip=0)
    return _same(ours, stock), steps


@pytest.mark.kind(29)
def test_a_unit_that_is_not_used(run: Run) -> None:
    # Layer 0 is a unit that never reduces, and has no state.
    assert run(2, _unused) == [(True, [3, 3])] * 2


def _some_without_gradient(group: dist.ProcessGroup) -> tuple[bool, int, list[str]]:
    # One unit for all layers: the reduction lacks the parameters of the skipped layer.
    results = []
    for config in (None, IDENTITY):
        torch.manual_seed(0)
        model = Layers(whole=True)
        fully_shard(model, mesh=_mesh(group, (group.size(),)))
        handle = megatron_loco.fsdp2.apply(model, config) if config else None
        gradients: list[Tensor | None] = []
        for step, skip in enumerate((None, 1, None)):
            (12 * model(whole_batch(step, group.rank()), skip=skip).sum()).backward()
            gradients += [None if p.grad is None else p.grad.full_tensor() for p in model.parameters()]
            model.zero_grad()
        results.append(gradients)
    assert handle is not None
    return (
        _same(results[1], results[0]),
        handle.model_states.exact_traffic.exact_steps,
        [str(s.step) for s in handle.states],
    )


@pytest.mark.kind(29)
def test_a_pass_without_some_gradients_is_exact_and_counted(run: Run) -> None:
    assert run(2, _some_without_gradient) == [(True, 1, ["2"])] * 2


def _sharded_columns(group: dist.ProcessGroup) -> bool:
    results = []
    for config in (None, IDENTITY):
        torch.manual_seed(0)
        model = nn.Linear(12, 5, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.randint(-2, 3, (5, 12)))
        fully_shard(model, mesh=_mesh(group, (group.size(),)), shard_placement_fn=lambda param: Shard(1))
        if config:
            megatron_loco.fsdp2.apply(model, config)
        batches = [torch.randint(-2, 3, (2, 12), generator=torch.Generator().manual_seed(7 + group.rank())).float()]
        gradients: list[Tensor | None] = []
        for step in range(2):
            (12 * model(batches[0] + step).sum()).backward()
            gradients.append(model.weight.grad.full_tensor())
            model.zero_grad()
        results.append(gradients)
    return _same(results[1], results[0])


@pytest.mark.kind(39)
def test_parameters_sharded_by_columns(run: Run) -> None:
    assert run(3, _sharded_columns) == [True] * 3


def _tied(group: dist.ProcessGroup, compile_blocks: bool) -> tuple[list[float], list[float]]:
    losses = []
    for config in (None, IDENTITY):
        torch.manual_seed(0)
        model = TinyLM(tied=True)
        if compile_blocks:
            for block in model.blocks:
                block.compile(backend="aot_eager")
        _shard(model, list(model.blocks), mesh=_mesh(group, (group.size(),)))
        if config:
            megatron_loco.fsdp2.apply(model, config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            loss = model(token_batch(step, group.rank()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses[:4], losses[4:]


@pytest.mark.kind(12)
@pytest.mark.parametrize("compile_blocks", [False, True])
def test_tied_weights_and_compiled_blocks(run: Run, compile_blocks: bool) -> None:
    # Two ranks: a sum of two and its half have one rounding, whatever the order.
    for stock, ours in run(2, _tied, compile_blocks):
        assert ours == stock
        assert stock[-1] < stock[0]


def _four_bits(group: dist.ProcessGroup, shape: tuple[int, ...]) -> list[tuple[float, int]]:
    stock, _ = _gradients(group, shape, None, steps=1)
    ours, _ = _gradients(group, shape, FOUR_BITS, steps=1)
    results = []
    for exact, sent in zip(stock, ours, strict=True):
        assert exact is not None
        assert sent is not None
        results.append(((sent - exact).abs().max().item(), exact.dim()))
    return results


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_four_bits_stay_within_half_a_step(run: Run, shape: tuple[int, ...]) -> None:
    # A code step is amax / 7, so each rank is off by at most amax / 14, and so is the mean. No gradient here exceeds
    # 12 (loss) x 3 (rows) x 33 x 31 (paths) in magnitude; the bias is one-dimensional and exact.
    for errors in run(4, _four_bits, shape):
        for error, dims in errors:
            assert error == 0 if dims == 1 else 0 < error <= 12 * 3 * 33 * 31 / 14


# --- checkpoints


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> None:
    for step in steps:
        model(token_batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _fresh(group: dist.ProcessGroup, shape: tuple[int, ...]) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = TinyLM()
    _shard(model, list(model.blocks), mesh=_mesh(group, shape))
    config = LoCoConfig(bits=4, warmup_steps=2, min_bucket_numel=0)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), megatron_loco.fsdp2.apply(model, config)


def _weights(model: nn.Module) -> list[Tensor]:
    return [param.full_tensor().detach().clone() for param in model.parameters()]


def _resume(group: dist.ProcessGroup, shape: tuple[int, ...], folder: str) -> tuple[bool, bool]:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer, _ = _fresh(group, shape)
    _train(model, optimizer, range(10), group.rank())
    straight = _weights(model)
    model, optimizer, handle = _fresh(group, shape)
    _train(model, optimizer, range(5), group.rank())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state, "loco": handle}, checkpoint_id=folder)

    outcomes = []
    for with_loco in (True, False):
        model, optimizer, handle = _fresh(group, shape)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        saved = {"model": model_state, "optimizer": optimizer_state}
        assert handle.fits(folder)
        if with_loco:
            saved["loco"] = handle
        dcp.load(saved, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        _train(model, optimizer, range(5, 10), group.rank())
        outcomes.append(all(torch.equal(a, b) for a, b in zip(_weights(model), straight, strict=True)))
    return outcomes[0], outcomes[1]


@pytest.mark.kind(27)
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_resume_is_bitwise(run: Run, tmp_path: Path, shape: tuple[int, ...]) -> None:
    for with_state, without in run(4, _resume, shape, str(tmp_path)):
        assert with_state
        assert not without, "the error state makes no difference: this test shows nothing"


def _save_for(group: dist.ProcessGroup, folder: str) -> list[str]:
    model, optimizer, handle = _fresh(group, (group.size(),))
    _train(model, optimizer, range(4), group.rank())
    dcp.save({"loco": handle}, checkpoint_id=folder)
    return [state.name for state in handle.states]


def _load_elsewhere(group: dist.ProcessGroup, folder: str) -> tuple[bool, str, list[int]]:
    model, optimizer, handle = _fresh(group, (group.size(),))
    fits = handle.fits(folder)
    message = ""
    try:
        dcp.load({"loco": handle}, checkpoint_id=folder)
    except CheckpointException as error:  # no Exception
        message = str(error)
    _train(model, optimizer, range(4, 6), group.rank())
    return fits, message, [state.step for state in handle.states]


@pytest.mark.kind(6)
def test_another_number_of_ranks_starts_with_zero_error(run: Run, tmp_path: Path) -> None:
    assert run(4, _save_for, str(tmp_path))[0] == ["blocks.0", "blocks.1", "root"]
    for fits, message, steps in run(2, _load_elsewhere, str(tmp_path)):
        assert not fits
        assert "Missing key" in message  # torch's own refusal, for whoever loads it all the same
        assert steps == [2, 2, 2]


def _damage(group: dist.ProcessGroup) -> tuple[str, float]:
    model, optimizer, handle = _fresh(group, (group.size(),))
    _train(model, optimizer, range(4), group.rank())
    saved = copy.deepcopy(handle.state_dict())
    if group.rank() == 1:
        tensor = next(iter(next(iter(saved.values()))["error"]["0"].values()))
        tensor.view(torch.uint8).flatten()[3] ^= 64
    _, _, other = _fresh(group, (group.size(),))
    try:
        other.load_state_dict(saved)
    except ValueError as error:
        message = str(error)
    torch.manual_seed(0)
    model = TinyLM()
    _shard(model, list(model.blocks), mesh=_mesh(group, (group.size(),)))
    config = LoCoConfig(bits=4, warmup_steps=2, min_bucket_numel=0, load_error="never")
    careful = megatron_loco.fsdp2.apply(model, config)
    careful.load_state_dict(saved)
    error = sum(
        tensor.float().abs().sum().item() for state in careful.states for tensor in state.error.tensors().values()
    )
    assert [state.step for state in careful.states] == [4, 4, 4]
    return message, error


def test_a_damaged_state_stops_every_rank(run: Run) -> None:
    (first, error), (second, _) = run(2, _damage)
    assert "another rank's" in first
    assert "blocks.0 (" in second
    assert "load_error='never'" in first
    assert error == 0


# --- what is refused, and what is undone


def _refusals(group: dist.ProcessGroup) -> list[str]:
    mesh = _mesh(group, (group.size(),))

    def message(prepare: Callable[[nn.Module], object], config: LoCoConfig = FOUR_BITS) -> str:
        model = Layers()
        prepare(model)
        try:
            megatron_loco.fsdp2.apply(model, config)
        except ValueError as error:
            return str(error)
        return ""

    def twice(model: nn.Module) -> None:
        fully_shard(model, mesh=mesh)
        megatron_loco.fsdp2.apply(model, FOUR_BITS)

    def hooked(model: nn.Module) -> None:
        fully_shard(model, mesh=_mesh(group, (2, 1)))
        model.set_all_reduce_hook(lambda tensor: None)

    differing = LoCoConfig(bits=4 if group.rank() else 8)
    return [
        message(lambda model: None),
        message(twice),
        message(hooked),
        message(lambda model: fully_shard(model, mesh=mesh), differing),
    ]


@pytest.mark.kind(21)
def test_refusals_name_the_remedy(run: Run) -> None:
    for not_sharded, twice, hooked, differing in run(2, _refusals):
        assert "call fully_shard on it first" in not_sharded
        assert "set_custom_reduce_scatter" in twice
        assert "set_all_reduce_hook" in hooked
        assert "--loco-bits: 8 on rank 0, 4 on rank 1" in differing


def _removed(group: dist.ProcessGroup, shape: tuple[int, ...]) -> bool:
    torch.manual_seed(0)
    stock, _ = _gradients(group, shape, None, steps=1)
    model = Layers(whole=True)
    torch.manual_seed(0)
    model = Layers(whole=True)
    _shard(model, list(model.layers), mesh=_mesh(group, shape))
    handle = megatron_loco.fsdp2.apply(model, FOUR_BITS)
    handle.remove()
    (12 * model(whole_batch(0, group.rank())).sum()).backward()
    return _same([p.grad.full_tensor() for p in model.parameters()], stock) and not handle.states


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_remove_restores_torch(run: Run, shape: tuple[int, ...]) -> None:
    assert run(4, _removed, shape) == [True] * 4


def _two_levels(group: dist.ProcessGroup) -> tuple[bool, list[bool]]:
    config = dataclasses.replace(IDENTITY, ranks_per_node=2)
    stock, _ = _gradients(group, (group.size(),), None)
    ours, steps = _gradients(group, (group.size(),), config)
    torch.manual_seed(0)
    model = Layers(whole=True)
    fully_shard(model, mesh=_mesh(group, (group.size(),)))
    handle = megatron_loco.fsdp2.apply(model, config)
    handle.prepare_states()
    return _same(ours, stock) and steps == [3] * 3, [state.exchange.is_two_level for state in handle.states]


def test_several_ranks_per_node_reduce_in_two_levels(run: Run) -> None:
    assert run(4, _two_levels) == [(True, [True])] * 4


def _discarded(group: dist.ProcessGroup) -> bool:
    torch.manual_seed(0)
    model = Layers()
    fully_shard(model, mesh=_mesh(group, (group.size(),)))
    config = dataclasses.replace(FOUR_BITS, rollback="restore")
    handle = megatron_loco.fsdp2.apply(model, config)

    def step(index: int) -> list[Tensor]:
        model.zero_grad()
        model(whole_batch(index, group.rank())).sum().backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    step(0)
    first = step(1)
    handle.discard()
    return all(torch.equal(a, b) for a, b in zip(step(1), first, strict=True)) and handle.states[0].step == 2


@pytest.mark.kind(1)
def test_a_skipped_step_can_be_taken_back(run: Run) -> None:
    assert run(2, _discarded) == [True] * 2
