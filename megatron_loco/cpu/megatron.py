"""What has to change in Megatron itself: its entry check, its dataset build, its optimizer class, its validation."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from megatron_loco.cpu.adam import FusedAdam
from megatron_loco.cpu.arguments import check_arguments
from megatron_loco.patching import Patch


def allow_no_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``initialize_megatron`` to pass its own ``allow_no_cuda=True``.

    Needed by ``megatron.training.training:pretrain``, which has no argument for it.
    """

    @functools.wraps(original)
    def initialize_without_cuda(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "allow_no_cuda": True})

    return initialize_without_cuda


def use_built_index_builder(original: Callable[[], None]) -> Callable[[], None]:
    """Wrap ``compile_helpers`` to build only what is not there yet.

    Needed by ``_compile_dependencies`` on an installed megatron-core: the wheel has the compiled module but no
    Makefile, so that ``make`` fails and rank 0 exits.
    """

    @functools.wraps(original)
    def compile_if_missing() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            original()

    return compile_if_missing


def check_before_validation(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``validate_args`` to run :func:`check_arguments` first, before any process group exists.

    Needed by ``parse_and_validate_args``: most of these flags fail much later, with errors that name no flag.
    """

    @functools.wraps(original)
    def validate_args_for_cpu(args: Any, defaults: Any = None) -> Any:
        check_arguments(args)
        return original(args, {} if defaults is None else defaults)

    return validate_args_for_cpu


_WHY_ADAM = "without Transformer Engine and Apex, DistributedOptimizer cannot resume (see FusedAdam)"

INDEX_BUILDER = Patch(
    target="megatron.core.datasets.utils:compile_helpers",
    kind="wrap",
    new=use_built_index_builder,
    why="it runs make, but the wheel has no Makefile",
)
"""Needed with an installed megatron-core on every device."""

PATCHES = (
    Patch(
        target="megatron.training.arguments:validate_args",
        kind="wrap",
        new=check_before_validation,
        why="flags that need a GPU should be named before process groups are made",
        parameters=("args", "defaults"),
    ),
    Patch(
        target="megatron.training.training:initialize_megatron",
        kind="wrap",
        new=allow_no_cuda,
        why="it asserts that CUDA is available",
        parameters=("allow_no_cuda",),
    ),
    INDEX_BUILDER,
    Patch(target="megatron.core.optimizer:Adam", kind="replace", new=FusedAdam, why=_WHY_ADAM),
    Patch(target="megatron.core.optimizer:USING_PYTORCH_OPTIMIZER", kind="replace", new=False, why=_WHY_ADAM),
    Patch(target="megatron.core.optimizer.distrib_optimizer:HAVE_APEX_OR_TE", kind="replace", new=True, why=_WHY_ADAM),
    Patch(
        target="megatron.core.optimizer.distrib_optimizer:USING_APEX_OPTIMIZER",
        kind="replace",
        new=True,
        why=_WHY_ADAM,
    ),
)
