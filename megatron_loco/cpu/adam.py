"""Adam with the interface and the state layout of Transformer Engine's and Apex's FusedAdam, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

# What Megatron passes on to FusedAdam beyond the hyperparameters (_get_megatron_optimizer_based_on_param_groups in
# megatron.core.optimizer), with the only value that this implementation computes.
_FIXED_OPTIONS: dict[str, Any] = {
    "amsgrad": False,
    "capturable": False,
    "exp_avg_dtype": torch.float32,
    "exp_avg_sq_dtype": torch.float32,
    "master_weight_dtype": torch.float32,
    "master_weights": False,
    "store_param_remainders": False,
    "use_decoupled_grad": False,
}


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW whose step count is in the parameter groups, in the order of operations of ``torch.optim.AdamW``.

    Megatron's ``DistributedOptimizer`` saves and resumes this layout correctly. With ``torch.optim.Adam`` (state
    ``step`` per parameter) it fails: ``state_dict`` asserts on an empty state, and a load overwrites the step.

    Source: Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, arXiv 1711.05101; layout as in
    ``apex.optimizers.FusedAdam`` and ``transformer_engine.pytorch.optimizers.FusedAdam``.

    Args:
        params: Parameters or groups. When :meth:`step` runs they must be float32, as Megatron's main parameters are;
            before, Megatron may exchange them.
        lr: Learning rate.
        bias_correction: Divide the moments by ``1 - beta ** step``.
        betas: Decay of the first and the second moment, each in [0, 1).
        eps: Added to the root of the second moment.
        weight_decay: Decoupled (``adam_w_mode``) or added to the gradient (L2).
        adam_w_mode: AdamW instead of Adam with L2.
        **options: Further options of FusedAdam, accepted only with the value that changes nothing.

    Raises:
        ValueError: a hyperparameter is out of range, or an option is unknown or would change the computation.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **options: Any,
    ) -> None:
        for name, value in options.items():
            if name not in _FIXED_OPTIONS:
                raise ValueError(f"FusedAdam on CPU does not know the option {name}={value!r}")
            if value != _FIXED_OPTIONS[name]:
                raise ValueError(f"FusedAdam on CPU supports {name}={_FIXED_OPTIONS[name]} only, not {value!r}")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be in [0, 1), not {betas}")
        if lr < 0.0 or eps < 0.0 or weight_decay < 0.0:
            raise ValueError(f"lr, eps and weight_decay must not be negative: {lr}, {eps}, {weight_decay}")
        super().__init__(
            params,
            {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay},
        )
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; a group without parameters does not count the step.

        Raises:
            ValueError: a parameter or its gradient is not float32.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return loss

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        if param.dtype != torch.float32 or grad.dtype != torch.float32:
            raise ValueError(f"FusedAdam on CPU updates float32 only, not {param.dtype} with gradient {grad.dtype}")
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        lr, (beta1, beta2), weight_decay = group["lr"], group["betas"], group["weight_decay"]
        correction1 = 1.0 - beta1 ** group["step"] if group["bias_correction"] else 1.0
        correction2 = 1.0 - beta2 ** group["step"] if group["bias_correction"] else 1.0
        if self.adam_w_mode:
            param.mul_(1.0 - lr * weight_decay)
        elif weight_decay != 0.0:
            grad = grad.add(param, alpha=weight_decay)
        state["exp_avg"].lerp_(grad, 1.0 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        denominator = (state["exp_avg_sq"].sqrt() / correction2**0.5).add_(group["eps"])
        param.addcdiv_(state["exp_avg"], denominator, value=-lr / correction1)
