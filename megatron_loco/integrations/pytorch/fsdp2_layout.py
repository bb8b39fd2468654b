"""Where the gradients of an FSDP2 unit lie in what it reduces, and the parts of torch that this is read from.

torch puts the shards of all ranks one after the other; a shard holds this rank's rows of each parameter, each padded to
the rows of the first rank (``foreach_reduce_scatter_copy_in`` in ``torch/distributed/fsdp/_fully_shard``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megatron_loco.config import LoCoConfig
from megatron_loco.core.wire import ParamSpan


def fsdp_units(model: nn.Module) -> list[tuple[str, Any]]:
    """Return name and parameter group of every unit of ``model`` that has parameters, in the order of its modules.

    Raises:
        ValueError: there is no unit, a unit has several parameter groups, or this torch is built otherwise.
    """
    units: list[tuple[str, Any]] = []
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        # fully_shard([a, b]) makes one unit of several modules.
        groups = [group for group in _param_groups(module) if not any(group is known for _, known in units)]
        if len(groups) > 1:
            raise ValueError(
                f"LoCo: {name or 'the root module'} has {len(groups)} parameter groups (meshes per parameter, by "
                "shard_placement_fn), which torch allows no reduce-scatter of one's own for; use one mesh per module"
            )
        # torch.compile wraps modules; a checkpoint of a compiled model fits one that is not.
        clean = ".".join(part for part in name.split(".") if part != "_orig_mod")
        units += [(clean or "root", group) for group in groups]
    if not units:
        raise ValueError("LoCo: no module of the model is sharded; call fully_shard on it first")
    return units


def _param_groups(module: FSDPModule) -> list[Any]:
    # Not in torch's public interface, which tells neither shapes nor groups.
    try:
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        for group in groups:
            _ = group.mesh_info, group.mp_policy, group.all_reduce_grads, group.gradient_divide_factor, group.device
            _ = [(p._orig_size, p.fsdp_placement.dim, p.sharded_param) for p in group.fsdp_params]
    except AttributeError as error:
        raise ValueError(
            f"LoCo: torch {torch.__version__} keeps FSDP2's parameters otherwise than torch 2.9 to 2.14 ({error}); use "
            "one of those"
        ) from error
    return list(groups)


def param_names(param_group: Any, model: nn.Module) -> list[str]:
    """Names of the parameters of a unit, as in ``model.named_parameters()`` of a model that is not compiled."""
    names = {id(param): name for name, param in model.named_parameters()}
    return [names[id(param.sharded_param)].replace("_orig_mod.", "") for param in param_group.fsdp_params]


def trainable(param_group: Any) -> tuple[int, ...]:
    """Positions of the parameters of a unit that get gradients."""
    return tuple(i for i, param in enumerate(param_group.fsdp_params) if param.sharded_param.requires_grad)


def num_gradients(param_group: Any) -> int:
    """Gradient elements of a unit without padding: from shapes, equal on all ranks."""
    return sum(param_group.fsdp_params[i]._orig_size.numel() for i in trainable(param_group))


def unit_layout(
    param_group: Any, names: Sequence[str], world_size: int, config: LoCoConfig
) -> tuple[int, list[ParamSpan]]:
    """Lay out what a unit hands to its reduce-scatter.

    Args:
        param_group: ``FSDPParamGroup``.
        names: Of its parameters.
        world_size: Ranks that shard the unit.
        config: Says which parameters are exact.

    Returns:
        Elements of the whole, padding included, and where each rank's piece of each parameter lies in it.
    """
    shard_spans, shard_numel = [], 0
    for index in trainable(param_group):
        param = param_group.fsdp_params[index]
        size, dim = param._orig_size, param.fsdp_placement.dim
        # Rows of another dimension than the first have to divide evenly, and torch moves them to the front.
        pieces = [size.numel() // world_size] * world_size
        if dim == 0:
            rows = -(-size[0] // world_size)
            row_numel = size[1:].numel()
            pieces = [min(max(size[0] - rank * rows, 0), rows) * row_numel for rank in range(world_size)]
        shard_spans.append((shard_numel, pieces, config.is_exact(names[index], len(size))))
        shard_numel += pieces[0]
    spans = [
        ParamSpan(rank * shard_numel + start, rank * shard_numel + start + pieces[rank], exact)
        for rank in range(world_size)
        for start, pieces, exact in shard_spans
    ]
    return world_size * shard_numel, spans


def shard_spans(spans: Sequence[ParamSpan], numel: int, world_size: int, rank: int) -> list[ParamSpan]:
    """The spans of :func:`unit_layout` that lie in the shard of ``rank``, counted from the start of that shard."""
    start = rank * (numel // world_size)
    stop = start + numel // world_size
    return [ParamSpan(s.start - start, s.stop - start, s.exact) for s in spans if start <= s.start and s.stop <= stop]
