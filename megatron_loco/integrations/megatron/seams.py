"""The table of Megatron functions that LoCo changes, with the reason for each.

Both ways to put LoCo into Megatron, at run time and by decorators in its files, install the wrappers of this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_loco.config import LoCoConfig
from megatron_loco.integrations.megatron import arguments, steps
from megatron_loco.integrations.megatron.checkpoint import Checkpoints
from megatron_loco.integrations.megatron.grad_sync import GradSync
from megatron_loco.integrations.megatron.metrics import Metrics, wrap_training_log
from megatron_loco.integrations.megatron.releases import SOURCES, SUPPORTED_RELEASES, is_older
from megatron_loco.patching import Patch

_BUFFER = "megatron.core.distributed.param_and_grad_buffer"
_DDP = "megatron.core.distributed.distributed_data_parallel"
_CHECKPOINTING = "megatron.training.checkpointing"
_RERUN = "megatron.core.rerun_state_machine:RerunStateMachine"
_OPTIMIZERS = (
    "megatron.core.optimizer.optimizer:ChainedOptimizer",
    "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer",
)
_FULLY_SHARDED = (
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter:FullyShardedDataParallel",
    "megatron.core.distributed.torch_fully_sharded_data_parallel:TorchFullyShardedDataParallel",
)

DISPATCHER = f"{_BUFFER}:dist_reduce_scatter_func"
"""The one seam that is no function of Megatron's, but a name to which it assigns one of torch's."""

_RELIED_ON = {
    f"{_BUFFER}:_ParamAndGradBucketGroup.finish_grad_sync": "waits for the handle of a bucket group, and once",
    f"{_BUFFER}:_ParamAndGradBucket.__init__": "says where in a bucket the gradients of a parameter are",
}
"""Not changed, but trusted to do as they are known to do."""


@dataclass(frozen=True, kw_only=True)
class Seam:
    """One function of Megatron and its wrapper.

    Attributes:
        target: Where it is defined, as in :class:`megatron_loco.patching.Patch`.
        wrap: From the stock function to the replacement.
        why: What breaks without it.
        parameters: Names of parameters that it must accept.
        since: The first release that has it.
        imported_as: Where other modules hold it under a name of their own, each with the first release in which they no
            longer do, or an empty string. A run-time patch has to replace it there as well.
    """

    target: str
    wrap: Callable[[Any], Any]
    why: str
    parameters: tuple[str, ...] | None
    since: str = SUPPORTED_RELEASES[0]
    imported_as: tuple[tuple[str, str], ...] = ()

    def is_in(self, release: str, *, training: bool) -> bool:
        """Whether a release has the function; arguments as in :meth:`patches`."""
        return not is_older(release, self.since) and (training or not _is_of_training(self.target))

    def patches(self, release: str, *, training: bool) -> list[Patch]:
        """Return what to install in a release; none where it does not have the function.

        Args:
            release: One of ``SUPPORTED_RELEASES``.
            training: Whether ``megatron.training`` is there.
        """
        if not self.is_in(release, training=training):
            return []
        others = [
            target
            for target, until in self.imported_as
            if (not until or is_older(release, until)) and (training or not _is_of_training(target))
        ]
        return [
            Patch(
                target=target,
                kind="wrap",
                new=self.wrap,
                why=self.why,
                parameters=self.parameters,
                sources=sources_of(self.target, release),
            )
            for target in (*others, self.target)
        ]


class Seams:
    """The wrappers, and the objects that they share.

    Args:
        config: Overrides what Megatron's command line says; may be set later.
        at_start: Called by ``validate_args`` if LoCo is on.
    """

    def __init__(self, config: LoCoConfig | None = None, at_start: Callable[[], None] = lambda: None) -> None:
        self.config = config
        self._grad_sync = grad_sync = GradSync()
        self._metrics = metrics = Metrics(grad_sync.states, grad_sync.stock_traffic)
        self._checkpoints = checkpoints = Checkpoints(self.active, loaded=metrics.restart)
        self.table = (
            Seam(
                target="megatron.training.arguments:add_megatron_arguments",
                wrap=arguments.wrap_add_megatron_arguments,
                parameters=("parser",),
                why="adds the --loco-* flags to Megatron's own parser",
            ),
            Seam(
                target="megatron.training.arguments:validate_args",
                imported_as=(("megatron.training.initialize:validate_args", "0.18"),),
                wrap=partial(arguments.wrap_validate_args, at_start=at_start),
                parameters=("args", "defaults"),
                why="refuses combinations that LoCo does not handle before anything is allocated",
            ),
            Seam(
                target="megatron.training.yaml_arguments:load_yaml",
                wrap=arguments.wrap_load_yaml,
                parameters=("yaml_path",),
                why="--yaml-cfg would drop --loco-bits without a word",
            ),
            Seam(
                target=f"{_DDP}:DistributedDataParallel.__init__",
                wrap=self._wrap_ddp_init,
                parameters=("config", "ddp_config", "module"),
                why="gives the buckets of the new model their LoCo states",
            ),
            *(
                Seam(
                    target=f"{fully_sharded}.__init__",
                    wrap=self._refuse_fully_sharded,
                    parameters=("config", "ddp_config", "module"),
                    why="LoCo does not reach its gradient reduction; without a word it would be off",
                )
                for fully_sharded in _FULLY_SHARDED
            ),
            Seam(
                target=f"{_BUFFER}:_ParamAndGradBucketGroup.start_grad_sync",
                wrap=grad_sync.wrap_start_grad_sync,
                parameters=("force_all_reduce",),
                why="says which bucket group is being reduced, and adds LoCo's work to the handle that Megatron waits "
                "for",
            ),
            Seam(
                target=DISPATCHER,
                wrap=grad_sync.dispatcher,
                parameters=None,
                why="the reduce-scatter itself: LoCo for buckets with a state, the stock function for all others",
            ),
            Seam(
                target=f"{_BUFFER}:_ParamAndGradBucketGroup.reset",
                wrap=grad_sync.wrap_reset,
                parameters=("self",),
                why="says that new gradients will come: the same ones must not be compressed twice",
            ),
            Seam(
                target="megatron.core.distributed.finalize_model_grads:finalize_model_grads",
                imported_as=(
                    ("megatron.training.training:finalize_model_grads", ""),
                    ("megatron.core.distributed:finalize_model_grads", ""),
                ),
                wrap=partial(grad_sync.unit.wrap_finalize_model_grads, self.active),
                parameters=("model", "num_tokens", "pg_collection", "force_all_reduce"),
                why="counts the tokens of a per-token loss before the reduction: the error is kept per token",
            ),
            *(
                Seam(
                    target=f"{target}.step",
                    wrap=partial(steps.wrap_optimizer_step, self.active),
                    parameters=("self",),
                    why="a step that the optimizer skips must not count in the error",
                )
                for target in _OPTIMIZERS
            ),
            Seam(
                target=f"{_RERUN}.should_run_forward_backward",
                wrap=partial(steps.wrap_should_run_forward_backward, grad_sync.states),
                parameters=("data_iterator",),
                why="a step that is repeated must not count twice in the error",
            ),
            Seam(
                target=f"{_RERUN}.should_checkpoint_and_exit",
                wrap=partial(steps.wrap_should_checkpoint_and_exit, grad_sync.states),
                parameters=("self",),
                why="a step that ends the job before the optimizer must not be in the error that is saved",
            ),
            Seam(
                target="megatron.core.transformer.moe.paged_stash:PagedStashRunner.prepare_for_rerun",
                since="0.18",
                wrap=partial(steps.wrap_prepare_for_rerun, grad_sync.states),
                parameters=("is_training",),
                why="a step that is repeated with more memory must not count twice in the error",
            ),
            Seam(
                target=f"{_CHECKPOINTING}:generate_state_dict",
                wrap=checkpoints.wrap_generate_state_dict,
                parameters=("args", "optimizer", "optim_sd_kwargs"),
                why="puts the error state and its description into what is saved, and asks for it where a load can use "
                "it",
            ),
            Seam(
                target=f"{_CHECKPOINTING}:_load_base_checkpoint",
                wrap=checkpoints.wrap_load_base_checkpoint,
                parameters=("rank0", "sharded_state_dict"),
                why="takes the error state over from what was read, or says why it starts at zero",
            ),
            Seam(
                target="megatron.training.training:training_log",
                wrap=self._wrap_training_log,
                parameters=("iteration",),
                why="logs wire bytes and compression error beside Megatron's own figures",
            ),
        )

    def active(self) -> LoCoConfig | None:
        """Return the settings, or ``None`` where LoCo is off."""
        if self.config is not None:
            return self.config
        try:
            from megatron.training.global_vars import get_args

            args = get_args()
        except (ImportError, AssertionError):
            # megatron.core used as a library, without Megatron's command line: off unless patch() was given a config.
            return None
        return arguments.config_from_args(args)

    def patches(self, release: str, *, training: bool) -> list[Patch]:
        """Return what to install in a release, and what to check there; see :meth:`Seam.patches`."""
        relied_on = [
            Patch(target=target, kind="check", why=why, sources=sources_of(target, release))
            for target, why in _RELIED_ON.items()
        ]
        return [*relied_on, *(p for seam in self.table for p in seam.patches(release, training=training))]

    def _wrap_ddp_init(self, stock: Callable[..., None]) -> Callable[..., None]:
        def __init__(model: Any, *args: Any, **kwargs: Any) -> None:
            stock(model, *args, **kwargs)
            # Also where LoCo is off: the ranks are compared, and one that is on must not wait for this one.
            self._grad_sync.attach(model, self.active())
            self._checkpoints.announce(self.active())

        return __init__

    def _refuse_fully_sharded(self, stock: Callable[..., None]) -> Callable[..., None]:
        # Megatron's command line refuses the flags already; users of megatron.core meet it here.
        def __init__(model: Any, *args: Any, **kwargs: Any) -> None:
            if self.active() is not None:
                raise ValueError(
                    f"LoCo does not reach the gradient reduction of {type(model).__name__}; use "
                    "DistributedDataParallel with use_distributed_optimizer=True"
                )
            stock(model, *args, **kwargs)

        return __init__

    def _wrap_training_log(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        return wrap_training_log(stock, lambda: self._metrics if self.active() is not None else None, self.active)


def _is_of_training(target: str) -> bool:
    # Wheels of 0.16, and trees that keep the core alone, do not have it.
    return target.startswith("megatron.training.")


def sources_of(target: str, release: str) -> frozenset[str] | None:
    """Return the known fingerprints of a function, or ``None`` where LoCo does not rely on its insides."""
    return frozenset(SOURCES[target][release]) if target in SOURCES else None
