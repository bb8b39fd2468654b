"""Megatron's own save and load of distributed checkpoints around the tiny GPT of :mod:`._gpt`, without its command
line, and a tool that damages the files."""

from __future__ import annotations

import io
import logging
import queue
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from megatron_loco.collectives.state import BucketState
from megatron_loco.integrations.megatron import checkpoint as checkpoint_module
from megatron_loco.integrations.megatron.optimizers import states_of
from tests.integrations.megatron._gpt import Training

ITERATION = 3


def flags(**changed: Any) -> Namespace:
    """What Megatron's checkpoint functions read of its command line."""
    return Namespace(
        **{
            "ckpt_format": "torch_dist",
            "use_distributed_optimizer": True,
            "dist_ckpt_optim_fully_reshardable": False,
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "no_save_optim": False,
            "no_save_rng": True,
            "async_save": False,
            "ckpt_assume_constant_structure": False,
            "stream_ckpt_dequant": False,
            "ckpt_fully_parallel_save": True,
            "ckpt_fully_parallel_load": False,
            "ckpt_fully_parallel_load_process_group": "dp",
            "ckpt_fully_parallel_load_exchange_algo": "broadcast",
            "ckpt_load_validate_sharding_integrity": True,
            "dist_ckpt_strictness": "assume_ok_unexpected",
            "verify_integrity": False,
            "non_persistent_global_ckpt_dir": None,
            "non_persistent_ckpt_type": None,
            "exit_on_missing_checkpoint": False,
            **changed,
        }
    )


class Saver:
    """Saves one checkpoint after another, as ``save_checkpoint`` does."""

    def __init__(self, training: Training, args: Namespace) -> None:
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.strategies import filesystem_async
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        self.training = training
        self.args = args
        # For the results of a writer in another process; the one here is this process, and its ranks are daemons, which
        # may have no children.
        filesystem_async._results_queue = queue.Queue()
        self.strategy: Any = TorchDistSaveShardedStrategy()
        self.strategy.use_cached_ckpt_structure = args.ckpt_assume_constant_structure
        if args.ckpt_fully_parallel_save:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            self.strategy = FullyParallelSaveStrategyWrapper(self.strategy, group, args.ckpt_assume_constant_structure)

    def save(self, folder: Path, iteration: int = ITERATION) -> Callable[[], None]:
        """Write a checkpoint; with ``async_save`` the data is written when the result is called."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.utils import _clean_metadata_for_serialization
        from megatron.training import checkpointing

        metadata = checkpointing._build_sharded_state_dict_metadata(self.args)
        state_dict = checkpointing.generate_state_dict(
            self.args,
            _unwrapped(self.training),
            self.training.optimizer,
            None,
            None,
            iteration=iteration,
            optim_sd_kwargs={"metadata": metadata},
            model_sd_kwargs={"metadata": metadata},
        )
        path = folder / f"iter_{iteration:07d}"
        if dist.get_rank() == 0:
            path.mkdir(parents=True)
            (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        dist.barrier()
        request = dist_checkpointing.save(
            state_dict,
            str(path),
            self.strategy,
            async_sharded_save=self.args.async_save,
            content_metadata=_clean_metadata_for_serialization(metadata),
            async_strategy="mcore",
        )
        return request.execute_sync if request is not None else lambda: None


def load(training: Training, folder: Path, args: Namespace, *, with_optimizer: bool = True) -> list[str]:
    """Load the latest checkpoint as ``load_checkpoint`` does; return what LoCo logged on this rank."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing import load_content_metadata
    from megatron.training import checkpointing

    common, *_ = checkpointing._load_base_checkpoint(str(folder), args, rank0=True)
    metadata = load_content_metadata(preloaded_state_dict=common)
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    with _logged() as messages:
        template = checkpointing.generate_state_dict(
            args,
            _unwrapped(training),
            training.optimizer if with_optimizer else None,
            None,
            None,
            optim_sd_kwargs={"metadata": metadata, "is_loading": True},
            model_sd_kwargs={"metadata": metadata},
        )
        state_dict, *_ = checkpointing._load_base_checkpoint(
            str(folder), args, rank0=False, sharded_state_dict=template
        )
    models = _unwrapped(training)
    for number, model in enumerate(models):
        model.load_state_dict(state_dict["model" if len(models) == 1 else f"model{number}"])
    if with_optimizer:
        training.optimizer.load_state_dict(state_dict["optimizer"])
    return messages


def states(training: Training) -> list[BucketState]:
    """This rank's bucket states."""
    return states_of(training.optimizer)


def snapshot(training: Training) -> list[Tensor | float | int]:
    """Copies of everything that must continue bit for bit: parameters, errors, counters."""
    found: list[Tensor | float | int] = [*training.parameters().values()]
    for state in states(training):
        found += [tensor.clone() for tensor in state.error.tensors().values()]
        found += [state.step, float(state.unit), *vars(state.traffic).values()]
    return found


def damage(folder: Path, key: str, how: str) -> None:
    """Spoil the stored bytes of one tensor and nothing else.

    Args:
        folder: One checkpoint.
        key: The tensor's key.
        how: ``flip`` inverts a bit of its data, ``wipe`` zeroes all that is stored of it, so that it cannot be read.
    """
    where = _stored(folder, key)
    path = folder / where.relative_path
    content = bytearray(path.read_bytes())
    archive = content[where.offset : where.offset + where.length]
    if how == "flip":
        tensor = torch.load(io.BytesIO(archive))
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert archive.count(data) == 1
        archive[archive.index(data) + len(data) // 2] ^= 0x10
    else:
        archive = bytearray(len(archive))
    content[where.offset : where.offset + where.length] = archive
    path.write_bytes(content)


def truncate(folder: Path, key: str) -> None:
    """Cut a file of a checkpoint off in the middle of one tensor."""
    where = _stored(folder, key)
    path = folder / where.relative_path
    path.write_bytes(path.read_bytes()[: where.offset + where.length // 2])


def _stored(folder: Path, key: str) -> Any:
    stored = FileSystemReader(folder).read_metadata().storage_data
    (where,) = (info for index, info in stored.items() if index.fqn == key)
    return where


def _unwrapped(training: Training) -> list[Any]:
    return [chunk.module.module for chunk in training.chunks]


@contextmanager
def _logged() -> Iterator[list[str]]:
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Collect()
    level = checkpoint_module.logger.level
    checkpoint_module.logger.setLevel(logging.INFO)
    checkpoint_module.logger.addHandler(handler)
    try:
        yield messages
    finally:
        checkpoint_module.logger.removeHandler(handler)
        checkpoint_module.logger.setLevel(level)
