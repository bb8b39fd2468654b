"""The table of Megatron functions that LoCo changes, with the reason for each and the sources it was tested on."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from megatron_loco.config import LoCoConfig
from megatron_loco.integrations.megatron import arguments, steps
from megatron_loco.integrations.megatron.checkpoint import Checkpoints
from megatron_loco.integrations.megatron.grad_sync import GradSync
from megatron_loco.integrations.megatron.metrics import Metrics, wrap_training_log
from megatron_loco.patching import Patch, SeamError

SUPPORTED_RELEASES = ("0.19",)
_BUFFER = "megatron.core.distributed.param_and_grad_buffer"
_DDP = "megatron.core.distributed.distributed_data_parallel"
_CHECKPOINTING = "megatron.training.checkpointing"
_RERUN = "megatron.core.rerun_state_machine:RerunStateMachine"
_FINALIZE = (
    "megatron.training.training:finalize_model_grads",
    "megatron.core.distributed:finalize_model_grads",
    "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
)
_OPTIMIZERS = (
    "megatron.core.optimizer.optimizer:ChainedOptimizer",
    "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer",
)
_FULLY_SHARDED = (
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter:FullyShardedDataParallel",
    "megatron.core.distributed.torch_fully_sharded_data_parallel:TorchFullyShardedDataParallel",
)


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
    metrics = Metrics(grad_sync.states, grad_sync.stock_traffic)
    active = partial(_active_config, config)
    checkpoints = Checkpoints(active, loaded=metrics.restart)
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
            new=partial(_wrap_ddp_init, grad_sync, checkpoints, active),
            parameters=("config", "ddp_config", "module"),
            sources=frozenset({"bb869de61095e98c"}),
            why="gives the buckets of the new model their LoCo states",
        ),
        *(
            Patch(
                target=f"{fully_sharded}.__init__",
                kind="wrap",
                new=partial(_refuse_fully_sharded, active),
                parameters=("config", "ddp_config", "module"),
                why="LoCo does not reach its gradient reduction; without a word it would be off",
            )
            for fully_sharded in _FULLY_SHARDED
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
            target=f"{_BUFFER}:_ParamAndGradBucketGroup.reset",
            kind="wrap",
            new=grad_sync.wrap_reset,
            parameters=("self",),
            why="says that new gradients will come: the same ones must not be compressed twice",
        ),
        *(
            Patch(
                target=target,
                kind="wrap",
                new=partial(grad_sync.unit.wrap_finalize_model_grads, active),
                parameters=("model", "num_tokens", "pg_collection", "force_all_reduce"),
                sources=frozenset({"3f44cc8723b87c16"}),
                why="counts the tokens of a per-token loss before the reduction: the error is kept per token",
            )
            for target in _FINALIZE
        ),
        *(
            Patch(
                target=f"{target}.step",
                kind="wrap",
                new=partial(steps.wrap_optimizer_step, active),
                parameters=("self",),
                why="a step that the optimizer skips must not count in the error",
            )
            for target in _OPTIMIZERS
        ),
        Patch(
            target=f"{_RERUN}.should_run_forward_backward",
            kind="wrap",
            new=partial(steps.wrap_should_run_forward_backward, grad_sync.states),
            parameters=("data_iterator",),
            sources=frozenset({"c4a657ce29566e72"}),
            why="a step that is repeated must not count twice in the error",
        ),
        Patch(
            target=f"{_RERUN}.should_checkpoint_and_exit",
            kind="wrap",
            new=partial(steps.wrap_should_checkpoint_and_exit, grad_sync.states),
            parameters=("self",),
            why="a step that ends the job before the optimizer must not be in the error that is saved",
        ),
        Patch(
            target="megatron.core.transformer.moe.paged_stash:PagedStashRunner.prepare_for_rerun",
            kind="wrap",
            new=partial(steps.wrap_prepare_for_rerun, grad_sync.states),
            parameters=("is_training",),
            why="a step that is repeated with more memory must not count twice in the error",
        ),
        Patch(
            target=f"{_CHECKPOINTING}:generate_state_dict",
            kind="wrap",
            new=checkpoints.wrap_generate_state_dict,
            parameters=("args", "optimizer", "optim_sd_kwargs"),
            why="puts the error state and its description into what is saved, and asks for it where a load can use it",
        ),
        Patch(
            target=f"{_CHECKPOINTING}:_load_base_checkpoint",
            kind="wrap",
            new=checkpoints.wrap_load_base_checkpoint,
            parameters=("rank0", "sharded_state_dict"),
            why="takes the error state over from what was read, or says why it starts at zero",
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
    grad_sync: GradSync, checkpoints: Checkpoints, active: Callable[[], LoCoConfig | None], stock: Callable[..., None]
) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        # Also where LoCo is off: the ranks are compared, and one that is on must not wait for this one.
        grad_sync.attach(self, active())
        checkpoints.announce(active())

    return __init__


def _refuse_fully_sharded(active: Callable[[], LoCoConfig | None], stock: Callable[..., None]) -> Callable[..., None]:
    # Megatron's command line refuses the flags already; users of megatron.core meet it here.
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if active() is not None:
            raise ValueError(
                f"LoCo does not reach the gradient reduction of {type(self).__name__}; use DistributedDataParallel "
                "with use_distributed_optimizer=True"
            )
        stock(self, *args, **kwargs)

    return __init__


def _wrap_training_log(
    metrics: Metrics, active: Callable[[], LoCoConfig | None], stock: Callable[..., Any]
) -> Callable[..., Any]:
    return wrap_training_log(stock, lambda: metrics if active() is not None else None, active)
