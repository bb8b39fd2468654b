"""Checkpoints: is there one to load and is it of this model, can one be written and how many fit on the disk."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from pathlib import Path

from megatron_loco.config import LoCoConfig
from megatron_loco.launch.checkpoint_size import CheckpointSize, estimate
from megatron_loco.launch.megatron_flags import quiet
from megatron_loco.launch.plan_model import Model, model_from_args
from megatron_loco.launch.preflight_folders import check_folder, free_bytes
from megatron_loco.launch.run_config import RunConfig

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's name for the file that says which checkpoint is the newest; it is written last."""

_FULL_BYTES = 1 << 26
"""A disk with less room is full, whatever a checkpoint takes."""

_SHAPES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "group_query_attention", "kv_channels"),
    *("num_experts", "moe_ffn_hidden_size", "swiglu", "normalization", "add_bias_linear"),
    *("untie_embeddings_and_output_weights", "position_embedding_type"),
)
"""Settings that decide what parameters there are, to explain a difference."""

_COMPARED_BY_MEGATRON = ("num_layers", "hidden_size", "num_attention_heads")


def check_load(args: Namespace) -> list[str]:
    """Look at the checkpoint that would be loaded.

    Megatron starts from random weights where ``load`` has no checkpoint, with a warning among a thousand lines, or ends
    with status 0 under ``exit-on-missing-checkpoint``. Here that is accepted only where it is what users mean: ``load``
    and ``save`` are the same folder, and this is the first start.

    Args:
        args: Megatron's parsed arguments.

    Returns:
        Warnings.

    Raises:
        ValueError: there is no checkpoint where one is expected, it is incomplete, or it is of another model.
    """
    if args.non_persistent_ckpt_type is not None:  # it may be elsewhere, and newer
        return []
    key, folder = "load", args.load
    if args.pretrained_checkpoint is not None and not _has_tracker(folder):
        key, folder = "pretrained-checkpoint", args.pretrained_checkpoint
    if folder is None or "://" in folder:
        return []
    if not _has_tracker(folder) and args.ckpt_step is None:
        first_start = key == "load" and args.save is not None and Path(folder).absolute() == Path(args.save).absolute()
        if first_start and not args.exit_on_missing_checkpoint:
            return []
        remedy = (
            "leave exit-on-missing-checkpoint out for a first start"
            if first_start
            else f"leave {key} out to start from random weights"
        )
        raise ValueError(f"{key}: {_without_tracker(Path(folder))}; {remedy}")
    found = _newest(key, Path(folder), args.ckpt_step)
    if not (found / "metadata.json").is_file():  # not torch_dist: whole tensors, which are left to the ranks
        return []
    return _check_same_model(key, found, args)


def check_save(args: Namespace, run: RunConfig, loco: LoCoConfig | None) -> list[str]:
    """Look at the folder for checkpoints and at its free space.

    Args:
        args: Megatron's parsed arguments.
        run: The launcher's settings.
        loco: LoCo's settings, or ``None`` where it is off.

    Returns:
        Warnings.

    Raises:
        ValueError: the folder cannot be written, or not even one checkpoint fits.
    """
    if args.save is None or "://" in args.save:
        return []
    check_folder(args.save, "save")
    try:
        size = estimate(args, run, loco)
    except ValueError as reason:
        return [f"save: free space was not compared with the size of a checkpoint ({reason})"]
    # A format that every node writes for itself may be on disks of the nodes.
    shares = 1 if args.ckpt_format == "torch_dist" else run.nnodes
    return _compare(args, size, free_bytes(args.save), shares)


def full_disk(args: Namespace, run: RunConfig, loco: LoCoConfig | None) -> str:
    """Say after a failure that the disk for checkpoints is full, if it is, and what can be resumed from.

    Args:
        args: Megatron's parsed arguments.
        run: The launcher's settings.
        loco: LoCo's settings, or ``None`` where it is off.

    Returns:
        The message; empty if there is room for another checkpoint, or none is written.
    """
    if args.save is None or "://" in args.save:
        return ""
    try:
        needed = estimate(args, run, loco).total
    except ValueError:  # of unknown size
        needed = _FULL_BYTES
    free = free_bytes(args.save)
    if free >= needed:
        return ""
    tracker = Path(args.save, TRACKER)
    kept = "no checkpoint is complete there"
    if tracker.is_file():
        kept = (
            f"the checkpoint of iteration {tracker.read_text().strip()} is complete: load={args.save} goes on from it"
        )
    return f"save: {args.save} has only {_size(free)} left, and a checkpoint takes {_size(needed)}; {kept}"


def _compare(args: Namespace, size: CheckpointSize, free: int, shares: int) -> list[str]:
    parts = f"{_size(size.model)} of model and optimizer"
    if size.error_state:
        parts += f" and {_size(size.error_state)} of LoCo's error state, which loco.save_error=never leaves out"
    text = f"save: {_size(free)} free for {args.save}, and one checkpoint takes about {_size(size.total)} ({parts})"
    if free < size.total / shares:
        raise ValueError(f"{text}; make room, or set save to a folder on another disk (save=null writes none)")
    num_written = 2 if args.save_interval and args.train_iters and args.save_interval < args.train_iters else 1
    if free < num_written * size.total / shares:
        return [f"{text}; the second one will not fit beside the first"]
    return []


def _has_tracker(folder: str | None) -> bool:
    return folder is not None and Path(folder, TRACKER).is_file()


def _without_tracker(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {folder}"
    if folder.name.startswith("iter_"):
        return f"{folder} is one checkpoint; name the folder around it, and ckpt-step for another than the newest"
    return f"{folder} holds no checkpoint (no file {TRACKER})"


def _newest(key: str, folder: Path, step: int | None) -> Path:
    where = f"{key}: {folder / TRACKER}"
    if step is not None:
        where, name = f"ckpt-step {step}", f"iter_{step:07d}"
    else:
        content = (folder / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
        if content != "release" and not content.isdecimal():
            raise ValueError(f"{where} must hold the number of an iteration, but holds {content[:40]!r}")
        name = content if content == "release" else f"iter_{int(content):07d}"
    if _is_complete(folder / name):
        return folder / name
    others = sorted(path.name for path in folder.glob("iter_*") if _is_complete(path))
    there = f"there are {', '.join(others[-5:])}" if others else "there is no other"
    raise ValueError(f"{where} asks for the checkpoint {folder / name}, which is missing or incomplete; {there}")


def _is_complete(checkpoint: Path) -> bool:
    if not checkpoint.is_dir():
        return False
    names = os.listdir(checkpoint)
    # Megatron writes this file of torch_dist last.
    return "metadata.json" in names or (bool(names) and not any(name.endswith(".distcp") for name in names))


def _check_same_model(key: str, checkpoint: Path, args: Namespace) -> list[str]:
    saved = None if getattr(args, "use_checkpoint_args", False) else _saved_arguments(key, checkpoint)
    if saved is None:
        return []
    try:
        theirs, mine = _parameters(model_from_args(saved)), _parameters(model_from_args(args))
    except ValueError:  # a model that is not counted: what Megatron compares is compared early all the same
        theirs, mine = ({n: getattr(a, n) for n in _COMPARED_BY_MEGATRON} for a in (saved, args))
    if theirs != mine:
        differing = [
            f"{name.replace('_', '-')} {getattr(saved, name)} there, {getattr(args, name)} here"
            for name in _SHAPES
            if getattr(saved, name, None) != getattr(args, name)
            and None not in (getattr(saved, name, None), getattr(args, name))
        ]
        if not differing:
            name = next(name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name))
            differing = [f"{name}: {theirs.get(name, 0):,} elements there, {mine.get(name, 0):,} here"]
        raise ValueError(f"{key}: the checkpoint {checkpoint} is of another model ({'; '.join(differing)})")
    sizes = (getattr(saved, "vocab_size", None), args.vocab_size)
    if None not in sizes and sizes[0] != sizes[1]:
        return [f"{key}: the vocabulary of {checkpoint} has {sizes[0]} tokens, that of this run {sizes[1]}"]
    return []


def _saved_arguments(key: str, checkpoint: Path) -> Namespace | None:
    with quiet():
        from megatron.core import dist_checkpointing
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            saved = dist_checkpointing.load_common_state_dict(str(checkpoint)).get("args")
        except (Exception, CheckpointException) as error:  # the latter, which is torch's, is no Exception
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise ValueError(
                f"{key}: the checkpoint {checkpoint} cannot be read, it may be incomplete: {reason}"
            ) from None
    if saved is None:
        return None
    # As on the command line, where these are derived by Megatron's validation only.
    changes = {name: None for name, value in vars(saved).items() if name.endswith("num_weight_shards") and value == 1}
    return Namespace(**{**vars(saved), **changes})


def _parameters(model: Model) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for param in (param for stage in model.stages for param in stage):
        # How many experts a rank holds, and how many rows a vocabulary is padded to, may differ between two runs.
        if not param.name.startswith(("embedding.word", "output_layer.")):
            name = re.sub(r"local_experts\.\d+", "local_experts", param.name)
            sizes[name] = sizes.get(name, 0) + param.numel * param.copies
    return sizes


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
