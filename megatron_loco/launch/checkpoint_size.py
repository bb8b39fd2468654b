"""How large one checkpoint of a run is, from its parameters."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from megatron_loco.config import LoCoConfig
from megatron_loco.core.wire import SCALE_BYTES
from megatron_loco.launch.plan_model import model_from_args
from megatron_loco.launch.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class CheckpointSize:
    """Bytes of a checkpoint, of all ranks together.

    Attributes:
        model: Weights and optimizer state.
        error_state: LoCo's error, which every rank has of its own.
    """

    model: float
    error_state: float

    @property
    def total(self) -> float:
        return self.model + self.error_state


def estimate(args: Namespace, run: RunConfig, loco: LoCoConfig | None) -> CheckpointSize:
    """Estimate the size of one checkpoint; where settings leave a choice, the smaller.

    Args:
        args: Megatron's parsed arguments.
        run: The launcher's settings.
        loco: LoCo's settings, or ``None`` where it is off.

    Returns:
        The size, without the few kilobytes of names and layouts.

    Raises:
        ValueError: the parameters of such a model are not counted.
    """
    model = model_from_args(args)
    weight_bytes = 2 if args.bf16 or args.fp16 else 4
    bytes_per_param = weight_bytes + (0 if args.no_save_optim else _optimizer_bytes(args))
    error = 0.0
    world_size = run.nnodes * run.nproc_per_node
    ranks_per_stage = world_size // args.pipeline_model_parallel_size
    data_parallel = ranks_per_stage // args.tensor_model_parallel_size
    saves_optimizer = args.ckpt_format == "torch_dist" and not args.no_save_optim
    if loco is not None and loco.keeps_error and loco.save_error == "always" and saves_optimizer and data_parallel > 1:
        bytes_per_element = loco.error_bits / 8 + (SCALE_BYTES / loco.block_size if loco.error_bits in (8, 16) else 0)
        elements = sum(param.numel for stage in model.stages for param in stage if param.num_dimensions > 1)
        # Two levels: only what is left after the sum inside a node has an error.
        sharers = 1 if loco.topology == "flat" or run.nnodes == 1 else run.nproc_per_node
        error = elements * ranks_per_stage / sharers * bytes_per_element
    return CheckpointSize(model=model.total * bytes_per_param, error_state=error)


def _optimizer_bytes(args: Namespace) -> int:
    main_copy = 4
    if args.optimizer != "adam" or args.use_precision_aware_optimizer:
        return main_copy
    # The distributed optimizer writes its copy of the weights also where they are fp32 themselves.
    return 8 + (main_copy if args.use_distributed_optimizer or args.bf16 or args.fp16 else 0)
