"""What torchrun starts on every rank: CPU runtime if asked for, LoCo's patches, then a Megatron training script.

``python -m torch.distributed.run ... -m megatron_loco.launch.entry --device cpu [--script pretrain_gpt.py] -- MEGATRON
FLAGS``

Without ``--script`` our own short :mod:`megatron_loco.launch.pretrain_gpt` runs, which needs nothing but the packages.
"""

from __future__ import annotations

import argparse
import gc
import runpy
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from megatron_loco.cpu.megatron import INDEX_BUILDER
from megatron_loco.launch.checkout import prefer_megatron_of
from megatron_loco.patching import apply


def main(argv: list[str]) -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser(prog="megatron_loco.launch.entry")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--script", type=Path, help="a Megatron training script, e.g. pretrain_gpt.py of a checkout")
    separator = argv.index("--") if "--" in argv else len(argv)
    own = parser.parse_args(argv[:separator])
    if separator == len(argv):
        parser.error("Megatron's flags are missing; they follow a --")
    megatron_flags = argv[separator + 1 :]
    if own.script is not None:
        prefer_megatron_of(own.script)
    sys.argv = [str(own.script or "pretrain_gpt"), *megatron_flags]
    # Megatron warns of each missing GPU package on every rank; on a CPU that is no news.
    if own.device == "cpu":
        warnings.filterwarnings("ignore", category=UserWarning)

    with ExitStack() as stack:
        if own.device == "cpu":
            from megatron_loco import cpu

            stack.enter_context(cpu.enter())
        elif own.script is None:
            # An installed megatron-core has its index builder compiled, but no Makefile, which Megatron runs anyway.
            stack.enter_context(apply([INDEX_BUILDER]))
        from megatron_loco.integrations.megatron import patch

        stack.enter_context(patch())
        stack.callback(flush_logs)
        try:
            _train(own.script)
        except SystemExit as ending:  # how Megatron ends after --exit-interval, --exit-signal-handler and the like
            if not ending.code:
                shut_down()
            raise
        shut_down()


def _train(script: Path | None) -> None:
    if script is not None:
        runpy.run_path(str(script), run_name="__main__")
    else:
        from megatron_loco.launch.pretrain_gpt import main as pretrain_gpt

        pretrain_gpt()


def shut_down() -> None:
    """End the process groups of a run that succeeded, while Python is still there.

    A thread of Gloo that lets go of the last reference to a tensor needs the interpreter. If that is on its way out,
    the thread takes the whole process down, and a run that was complete counts as failed (SIGABRT, "terminate called
    without an active exception"; seen once in about a hundred runs on a busy machine).
    """
    from megatron.core import parallel_state

    if not dist.is_initialized():
        return
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    gc.collect()  # models hold groups, and are in reference cycles; a group joins its threads when it goes


def flush_logs() -> None:
    """Write out what TensorBoard's background thread still holds: at exit it may lose the last values."""
    from megatron.training import get_tensorboard_writer

    writer = get_tensorboard_writer()
    if writer is not None:
        writer.flush()


if __name__ == "__main__":
    record(main)(sys.argv[1:])  # so that launch.agent can say what went wrong here
