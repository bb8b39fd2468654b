"""FusedAdam against torch's own optimizers, its state layout, and what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from megatron_loco.cpu.adam import FusedAdam

STEPS = 20
LR = 1e-2
SETTINGS: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in (1, 257)]


def train(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize(("adam_w_mode", "torch_class"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_equals_torch_to_float32_rounding(adam_w_mode: bool, torch_class: Any) -> None:
    ours, theirs = parameters(), parameters()
    train(FusedAdam(ours, adam_w_mode=adam_w_mode, **SETTINGS), ours, STEPS)
    train(torch_class(theirs, **SETTINGS), theirs, STEPS)
    for mine, other, start in zip(ours, theirs, parameters(), strict=True):
        # Each step rounds the parameter twice (decay, update), each time by at most half a unit, 2**-24 relative, in
        # either optimizer; the update itself (about lr) is rounded ten times or so, which adds 10 * lr * 2**-24.
        tolerance = STEPS * 2 * (2 * other.abs().max().item() + 10 * LR) * 2**-24
        assert (mine - other).abs().max().item() <= tolerance
        assert (mine - start).abs().max().item() > STEPS * LR / 10  # both went somewhere


def test_without_bias_correction_first_step_is_small() -> None:
    param = torch.nn.Parameter(torch.zeros(1))
    param.grad = torch.ones(1)
    FusedAdam([param], lr=1.0, betas=(0.5, 0.75), eps=0.0, bias_correction=False).step()
    assert param.item() == -0.5 / 0.25**0.5  # exp_avg 0.5, exp_avg_sq 0.25: exact in binary


def test_step_is_in_the_groups_and_not_in_the_state() -> None:
    params = parameters()
    groups: list[dict[str, Any]] = [{"params": params}, {"params": []}]
    optimizer = FusedAdam(groups, **SETTINGS)
    train(optimizer, params, 3)
    assert optimizer.param_groups[0]["step"] == 3
    assert "step" not in optimizer.param_groups[1]
    assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in optimizer.state.values())


def test_state_dict_round_trip_continues_bitwise() -> None:
    params = parameters()
    optimizer = FusedAdam(params, **SETTINGS)
    train(optimizer, params, 5)
    copies = [torch.nn.Parameter(param.detach().clone()) for param in params]
    resumed = FusedAdam(copies, lr=1.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.param_groups[0]["step"] == 5
    train(optimizer, params, 5, seed=2)
    train(resumed, copies, 5, seed=2)
    for param, other in zip(params, copies, strict=True):
        assert torch.equal(param, other)


def test_takes_what_megatron_passes() -> None:
    FusedAdam(parameters(), capturable=False, adam_w_mode=True, **SETTINGS)


@pytest.mark.parametrize(
    "option",
    [
        {"capturable": True},
        {"amsgrad": True},
        {"master_weights": True},
        {"use_decoupled_grad": True},
        {"store_param_remainders": True},
        {"exp_avg_dtype": torch.bfloat16},
        {"exp_avg_sq_dtype": torch.uint8},
        {"master_weight_dtype": torch.float16},
        {"nesterov": False},
    ],
)
def test_option_that_would_change_the_computation_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        FusedAdam(parameters(), **option)


@pytest.mark.parametrize("setting", [{"lr": -1.0}, {"eps": -1.0}, {"weight_decay": -0.1}, {"betas": (0.9, 1.0)}])
def test_hyperparameter_out_of_range_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        FusedAdam(parameters(), **setting)


def test_only_float32_is_updated() -> None:
    param = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="bfloat16"):
        FusedAdam([param]).step()


def test_closure_gives_the_loss() -> None:
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = FusedAdam([param], lr=0.5)

    def closure() -> torch.Tensor:
        loss = (param * param).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 1.0
    assert param.item() == pytest.approx(0.5, rel=1e-6)  # the first step of Adam is lr; eps is 1e-8 of it
