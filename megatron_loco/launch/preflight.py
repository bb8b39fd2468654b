"""What would stop a run on this machine, looked for before any of its ranks starts.

Each node looks for itself and waits for no other. Files are read, never changed; folders are tried with a temporary
file, so that nodes with a shared file system do not see each other. All of it takes less than a second, apart from a
name server that does not answer. What is found is a ValueError with one line, or a warning.
"""

from __future__ import annotations

import argparse
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import NoReturn

from megatron_loco.config import LoCoConfig
from megatron_loco.launch import preflight_checkpoint, preflight_data, preflight_network, preflight_tokenizer
from megatron_loco.launch.megatron_flags import quiet
from megatron_loco.launch.preflight_folders import check_folder
from megatron_loco.launch.run_config import RunConfig
from megatron_loco.launch.torchrun import Rendezvous


def parse(argv: Sequence[str]) -> Namespace:
    """Parse Megatron's arguments without validating them (imports Megatron).

    Args:
        argv: Megatron's own arguments.

    Returns:
        The namespace; what Megatron derives from other values is not in it.

    Raises:
        ValueError: Megatron's parser refuses them.
    """
    with quiet():
        from megatron.training.arguments import add_megatron_arguments

        parser = _Parser(allow_abbrev=False)
        add_megatron_arguments(parser)
    return parser.parse_args(argv)


def check_layout(args: Namespace, run: RunConfig) -> None:
    """Compare the ranks with the parallel sizes and the batch, in the words of the configuration.

    Megatron's own validation finds most of this too, but speaks of sums that are in no configuration.

    Args:
        args: Megatron's parsed arguments.
        run: The launcher's settings.

    Raises:
        ValueError: the ranks cannot be spread like that, the batch cannot be shared out, or eval-interval is missing.
    """
    world_size = run.nnodes * run.nproc_per_node
    dense = {
        "tensor-model-parallel-size": args.tensor_model_parallel_size,
        "pipeline-model-parallel-size": args.pipeline_model_parallel_size,
        "context-parallel-size": args.context_parallel_size,
    }
    experts = {
        "expert-tensor-parallel-size": args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
        "pipeline-model-parallel-size": args.pipeline_model_parallel_size,
        "expert-model-parallel-size": args.expert_model_parallel_size,
    }
    for sizes in (dense, experts):
        product = 1
        for size in sizes.values():
            product *= size
        if product > 0 and world_size % product:
            factors = [f"{name} {size}" for name, size in sizes.items() if size > 1]
            named = " x ".join(factors) + (f" = {product}" if len(factors) > 1 else "")
            raise ValueError(
                f"run.nnodes {run.nnodes} x run.nproc_per_node {run.nproc_per_node} = {world_size} ranks cannot be "
                f"divided by {named}: start {product} ranks or a multiple, or make these sizes smaller"
            )
    data_parallel = world_size // (
        args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    )
    batch, micro = args.global_batch_size, args.micro_batch_size
    if batch and micro and batch % (micro * data_parallel) and not args.decrease_batch_size_if_needed:
        raise ValueError(
            f"global-batch-size {batch} cannot be divided by micro-batch-size {micro} x {data_parallel} data-parallel "
            f"ranks: make it a multiple of {micro * data_parallel}"
        )
    if not args.eval_interval and not args.skip_train and not getattr(args, "full_validation", False):
        raise ValueError(
            "eval-interval is missing: Megatron counts validation samples with it, even where eval-iters is 0; set it, "
            f"e.g. eval-interval={args.train_iters or 1000}"
        )


def check(
    args: Namespace,
    *,
    run: RunConfig,
    loco: LoCoConfig | None,
    rendezvous: Rendezvous,
    environment: Mapping[str, str],
    own_script: bool,
) -> list[str]:
    """Look at devices, network, data, tokenizer, checkpoints and folders of this node.

    Args:
        args: Megatron's parsed arguments.
        run: The launcher's settings, with ``device`` settled.
        loco: LoCo's settings, or ``None`` where it is off.
        rendezvous: Where the nodes meet.
        environment: Environment variables of the ranks.
        own_script: Whether the ranks run :mod:`megatron_loco.launch.pretrain_gpt`, whose defaults are known.

    Returns:
        Warnings.

    Raises:
        ValueError: the run could not work on this machine; the message names the setting and the remedy.
    """
    warnings = _check_devices(run, environment)
    preflight_network.check_rendezvous(rendezvous)
    tokenizer_type = args.tokenizer_type or ("NullTokenizer" if own_script else None)
    preflight_tokenizer.check_tokenizer(args, tokenizer_type)
    if run.corpus is None:  # what the launcher prepares is right by construction
        vocabulary = preflight_tokenizer.vocabulary_size(args, tokenizer_type)
        warnings += preflight_data.check_data(args, vocabulary)
    else:
        check_folder(run.data_dir, "run.data_dir")
    warnings += preflight_checkpoint.check_load(args)
    if rendezvous.node_rank == 0:
        check_folder(run.output_dir, "run.output_dir")
    if args.tensorboard_dir and rendezvous.node_rank == rendezvous.nnodes - 1:  # Megatron's last rank writes it
        check_folder(args.tensorboard_dir, "tensorboard-dir")
    return warnings + preflight_checkpoint.check_save(args, run, loco)


def _check_devices(run: RunConfig, environment: Mapping[str, str]) -> list[str]:
    if run.device == "cpu":
        cores = len(os.sched_getaffinity(0))
        if run.nproc_per_node > cores:
            return [f"run.nproc_per_node is {run.nproc_per_node}, and this machine has {cores} cores to share"]
        return []
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible != os.environ.get("CUDA_VISIBLE_DEVICES"):  # set for the ranks alone
        gpus = min(gpus, len([name for name in visible.split(",") if name.strip()]))
    if not gpus:
        raise ValueError(
            "run.device is cuda, but torch sees no GPU here: use run.device=cpu, or look at the driver, at "
            "CUDA_VISIBLE_DEVICES and at whether torch is built for CUDA (megatron-loco doctor)"
        )
    if run.nproc_per_node > gpus:
        raise ValueError(
            f"run.nproc_per_node is {run.nproc_per_node}, but there are {gpus} GPUs here, and each rank takes one: set "
            f"run.nproc_per_node={gpus} or less"
        )
    return []


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"Megatron refuses these settings: {message}")
