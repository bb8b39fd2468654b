"""What has to change in Megatron itself: its entry check, its dataset build, its optimizer class, its validation."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
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

    Needed by ``parse_and_validate_args`` (before 0.18: ``initialize_megatron``): most of these flags fail much later,
    with errors that name no flag.
    """

    @functools.wraps(original)
    def validate_args_for_cpu(args: Any, defaults: Any = None) -> Any:
        check_arguments(args)
        return original(args, {} if defaults is None else defaults)

    return validate_args_for_cpu


def keep_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the interleaved pipeline schedule to keep a stage's outputs until they are sent.

    Needed by ``forward_backward_pipelining_with_interleaving`` until 0.17, which frees them right after the send began
    (``deallocate_pipeline_outputs``): on a GPU the stream orders the two, Gloo's threads would send what comes next.
    """

    @functools.wraps(original)
    def forward_backward(*, model: Any, **kwargs: Any) -> Any:
        get_model_config = importlib.import_module("megatron.core.utils").get_model_config
        for chunk in model:
            get_model_config(chunk).deallocate_pipeline_outputs = False
        return original(model=model, **kwargs)

    return forward_backward


def norm_of_torch(original: Any) -> Any:
    """Return Megatron's torch norm, of the kind that the configuration says, in place of Transformer Engine's.

    Needed by ``HybridStack.__init__``, for the norm behind the last layer.
    """
    return importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm


_WHY_ADAM = "without Transformer Engine and Apex, DistributedOptimizer cannot resume (see FusedAdam)"

INDEX_BUILDER = Patch(
    target="megatron.core.datasets.utils:compile_helpers",
    kind="wrap",
    new=use_built_index_builder,
    why="it runs make, but the wheel has no Makefile",
)
"""Needed with an installed megatron-core on every device."""

_VALIDATION = Patch(
    target="megatron.training.arguments:validate_args",
    kind="wrap",
    new=check_before_validation,
    why="flags that need a GPU should be named before process groups are made",
    parameters=("args", "defaults"),
)

PATCHES = (
    _VALIDATION,
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
"""Needed in every release."""

_OF_SOME_RELEASES = (
    # initialize_megatron calls validate_args itself, by the name under which its module imported it.
    ((0, 16), (0, 18), replace(_VALIDATION, target="megatron.training.initialize:validate_args")),
    # DistributedOptimizer takes instances of this class only; since 0.19 any optimizer that can start its state.
    (
        (0, 16),
        (0, 19),
        Patch(target="megatron.core.optimizer.distrib_optimizer:Adam", kind="replace", new=FusedAdam, why=_WHY_ADAM),
    ),
    # 0.18 waits for the send before it frees what is sent.
    (
        (0, 16),
        (0, 18),
        Patch(
            target="megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
            kind="wrap",
            new=keep_outputs,
            why="an interleaved pipeline trains on garbage now and then: outputs are freed while Gloo sends them",
            parameters=("model",),
        ),
    ),
    # Hybrid models came with 0.18.
    (
        (0, 18),
        None,
        Patch(
            target="megatron.core.models.hybrid.hybrid_block:TENorm",
            kind="wrap",
            new=norm_of_torch,
            why="HybridStack asks no spec for its last norm, and that of Transformer Engine is not there",
        ),
    ),
)
"""First release, first release no more, patch. All that differs by release is here."""


def patches_of(version: str) -> tuple[Patch, ...]:
    """Return what ``megatron.core.__version__`` needs besides :data:`PATCHES`."""
    release = tuple(int(part) for part in version.split(".")[:2])
    return tuple(
        patch for first, end, patch in _OF_SOME_RELEASES if first <= release and (end is None or release < end)
    )
