"""Placement: whatever Megatron puts on ``cuda`` is put on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_loco.patching import Patch

CPU = torch.device("cpu")


def on_cpu(value: Any) -> Any:
    """Return the CPU device in place of a CUDA device or of its name (``"cuda"``, ``"cuda:1"``), else ``value``."""
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return CPU
    return value


class CudaMeansCpu(TorchFunctionMode):
    """Maps CUDA devices in the arguments of every torch function (factories, ``Tensor.to``, ``torch.device``) to CPU.

    Megatron writes ``device="cuda"`` in about a hundred places, for example
    ``torch.tensor([_STARTUP_TIMESTAMPS["program_start"]], device="cuda")`` in ``megatron.training.training:pretrain``.
    A positional argument is mapped too (``tensor.to("cuda")``): no torch function takes the word for anything else.

    Modes are per thread; the autograd engine carries them into its own threads.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.device:
            # On its own: torch.device("cuda", 1) would become "cpu:1", which equals the device of no tensor.
            if on_cpu(args[0] if args else named.get("type", named.get("device"))) is CPU:
                return CPU
            return func(*args, **named)
        if "device" in named:
            named["device"] = on_cpu(named["device"])
        return func(*(on_cpu(argument) for argument in args), **named)


def stay_on_cpu(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """``Tensor.cuda``: the tensor itself, as for one that is on the device already.

    Needed by ``model_module.cuda(torch.cuda.current_device())`` in ``megatron.training.training:get_model`` and by
    every ``batch[key].cuda(non_blocking=True)``.
    """
    return tensor


def type_names_with_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Tensor.type`` so that the name it returns is that of a CUDA tensor.

    Needed by ``DistributedOptimizer`` (``model_param.type() in ["torch.cuda.HalfTensor", ...]``), by
    ``Float16OptimizerWithFloat16Params`` and by ``clip_grad_by_total_norm_fp32``, which compare names.
    """

    def type_with_cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The C method finds torch.Tensor.type again, which is this function, unless dispatch is off.
        with torch._C.DisableTorchFunction():
            result = original(tensor, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    return type_with_cuda


PATCHES = (
    Patch(
        target="torch:Tensor.cuda",
        kind="replace",
        new=stay_on_cpu,
        why="get_model moves the model to the device with Module.cuda, which raises without CUDA",
    ),
    Patch(
        target="torch:Tensor.type",
        kind="wrap",
        new=type_names_with_cuda,
        why="the optimizers raise TypeError for a parameter whose type is not named torch.cuda.*Tensor",
    ),
)
