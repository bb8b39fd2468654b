"""The table of Megatron functions that LoCo changes, with the reason for each and the sources it was tested on."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from megatron_loco.config import LoCoConfig
from megatron_loco.integrations.megatron import arguments
from megatron_loco.integrations.megatron.grad_sync import GradSync
from megatron_loco.integrations.megatron.metrics import Metrics, wrap_training_log
from megatron_loco.patching import Patch, SeamError

SUPPORTED_RELEASES = ("0.19",)
_BUFFER = "megatron.core.distributed.param_and_grad_buffer"
_DDP = "megatron.core.distributed.distributed_data_parallel"


def supported_release(allow_unknown: bool) -> None:
    """Check the installed megatron-core.

    Raises:
        SeamError: it is missing, or not one of :data:`SUPPORTED_RELEASES` and ``allow_unknown`` is not set.
    """
    try:
        installed = version("megatron-core")
    except PackageNotFoundError:
        # A source checkout on PYTHONPATH has no package metadata, but knows its version.
        try:
            installed = importlib.import_module("megatron.core").__version__
        except ImportError as error:
            raise SeamError("megatron-core is not installed; pip install 'megatron-core>=0.19,<0.20'") from error
    release = ".".join(installed.split(".")[:2])
    if release not in SUPPORTED_RELEASES and not allow_unknown:
        raise SeamError(
            f"megatron-core {installed} is not supported (tested: {', '.join(SUPPORTED_RELEASES)}.x); install a "
            "supported release, or pass allow_unknown_source=True at your own risk"
        )


def seam_patches(config: LoCoConfig | None) -> list[Patch]:
    """Return the patches; ``config`` overrides what Megatron's command line says."""
    grad_sync = GradSync()
    metrics = Metrics(grad_sync.states)
    active = partial(_active_config, config)
    return [
        Patch(
            target="megatron.training.arguments:add_megatron_arguments",
            kind="wrap",
            new=arguments.wrap_add_megatron_arguments,
            parameters=("parser",),
            why="adds the --loco-* flags to Megatron's own parser",
        ),
        Patch(
            target="megatron.training.arguments:validate_args",
            kind="wrap",
            new=arguments.wrap_validate_args,
            parameters=("args", "defaults"),
            why="refuses combinations that LoCo does not handle before anything is allocated",
        ),
        Patch(
            target="megatron.training.yaml_arguments:load_yaml",
            kind="wrap",
            new=arguments.wrap_load_yaml,
            parameters=("yaml_path",),
            why="--yaml-cfg would drop --loco-bits without a word",
        ),
        Patch(
            target=f"{_DDP}:DistributedDataParallel.__init__",
            kind="wrap",
            new=partial(_wrap_ddp_init, grad_sync, active),
            parameters=("config", "ddp_config", "module"),
            sources=frozenset({"bb869de61095e98c"}),
            why="gives the buckets of the new model their LoCo states",
        ),
        Patch(
            target=f"{_BUFFER}:_ParamAndGradBucketGroup.start_grad_sync",
            kind="wrap",
            new=grad_sync.wrap_start_grad_sync,
            parameters=("force_all_reduce",),
            sources=frozenset({"c896a8c5f7219027"}),
            why="says which bucket group is being reduced, and adds LoCo's work to the handle that Megatron waits for",
        ),
        Patch(
            target=f"{_BUFFER}:dist_reduce_scatter_func",
            kind="wrap",
            new=grad_sync.dispatcher,
            why="the reduce-scatter itself: LoCo for buckets with a state, the stock function for all others",
        ),
        Patch(
            target="megatron.training.training:training_log",
            kind="wrap",
            new=partial(_wrap_training_log, metrics, active),
            parameters=("iteration",),
            why="logs wire bytes and compression error beside Megatron's own figures",
        ),
    ]


def _active_config(config: LoCoConfig | None) -> LoCoConfig | None:
    if config is not None:
        return config
    from megatron.training.global_vars import get_args

    try:
        args = get_args()
    except AssertionError:
        # megatron.core used as a library, without Megatron's command line: off unless a config was passed to patch().
        return None
    return arguments.config_from_args(args)


def _wrap_ddp_init(
    grad_sync: GradSync, active: Callable[[], LoCoConfig | None], stock: Callable[..., None]
) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        config = active()
        if config is not None:
            grad_sync.attach(self, config)

    return __init__


def _wrap_training_log(
    metrics: Metrics, active: Callable[[], LoCoConfig | None], stock: Callable[..., Any]
) -> Callable[..., Any]:
    return wrap_training_log(stock, lambda: metrics if active() is not None else None)
