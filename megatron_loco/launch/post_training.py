"""What our training script adds to Megatron's for post-training: conversations as data, and frozen parameters.

Megatron has ``--sft`` for the first, which needs Transformer Engine, and for the second only ``--freeze-all-layers``.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_loco.launch.run_config import DATA_FORMATS
from megatron_loco.patching import Patch, PatchHandle, apply


def enter() -> PatchHandle:
    """Add ``--data-format`` and ``--freeze-params`` to Megatron's flags, and make the second work, until the handle is
    closed."""
    return apply(_PATCHES)


def add_flags(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``add_megatron_arguments``."""

    @functools.wraps(stock)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = stock(parser)
        group = parser.add_argument_group("post-training")
        group.add_argument(
            "--data-format",
            choices=DATA_FORMATS,
            default="text",
            help="chat: documents are conversations in role tokens, and only what the assistant says counts",
        )
        group.add_argument(
            "--freeze-params",
            metavar="PATTERN,...",
            help="parameters that are not trained: shell patterns of names, such as embedding.*,decoder.layers.0.*",
        )
        return parser

    return add_megatron_arguments


def freeze_as_built(stock: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``GPTModel.__init__``: gradient buffers, made next, hold only what requires gradients."""

    @functools.wraps(stock)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        for name, param in global_names(self):
            if any(fnmatchcase(name, pattern) for pattern in _patterns()):
                param.requires_grad_(False)

    return __init__


def check_patterns(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``setup_model_and_optimizer`` to refuse, on all ranks, patterns that match nothing in the whole model, and
    those that leave nothing to train."""

    @functools.wraps(stock)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        patterns = _patterns()
        if patterns:
            params = [named for chunk in result[0] for named in global_names(chunk)]
            found = [any(fnmatchcase(name, pattern) for name, _ in params) for pattern in patterns]
            trained = any(param.requires_grad for _, param in params)
            # A pipeline stage sees its own layers only.
            counts = torch.tensor([*found, trained], dtype=torch.int).cuda()
            dist.all_reduce(counts)
            *matches, ranks_that_train = counts.tolist()
            unknown = [pattern for pattern, count in zip(patterns, matches, strict=True) if not count]
            if unknown:
                raise ValueError(f"--freeze-params: no parameter is called {', '.join(unknown)}")
            if not ranks_that_train:
                raise ValueError("--freeze-params: all parameters are frozen, so there is nothing to train")
        return result

    return setup_model_and_optimizer


def global_names(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters under the names that they have in a model on one rank.

    Args:
        model: A ``GPTModel``, or one that is wrapped for training.

    Yields:
        Name and parameter: without the prefixes of wrappers, and with layers numbered through the whole model, where
        Megatron counts those of a pipeline stage from 0.
    """
    numbers = {name: module.layer_number - 1 for name, module in model.named_modules() if _LAYER.search(name)}
    for name, param in model.named_parameters():
        layer = _LAYER_PREFIX.match(name)
        if layer is not None:
            name = f"{layer['before']}{numbers[layer['layer']]}{name[layer.end() :]}"
        yield name.rpartition("module.")[2], param


def _patterns() -> list[str]:
    from megatron.training import get_args

    given = get_args().freeze_params
    return [] if given is None else [pattern.strip() for pattern in given.split(",")]


_LAYER = re.compile(r"(^|\.)decoder\.layers\.\d+$")
_LAYER_PREFIX = re.compile(r"(?P<layer>(?P<before>(?:.*?\.)?decoder\.layers\.)\d+)(?=\.)")

_PATCHES = (
    Patch(
        target="megatron.training.arguments:add_megatron_arguments",
        kind="wrap",
        new=add_flags,
        why="Megatron's parser refuses flags that it does not know",
    ),
    Patch(
        target="megatron.core.models.gpt.gpt_model:GPTModel.__init__",
        kind="wrap",
        new=freeze_as_built,
        why="there is no seam between the model and its gradient buffers in every release",
    ),
    Patch(
        target="megatron.training.training:setup_model_and_optimizer",
        kind="wrap",
        new=check_patterns,
        why="only when all chunks of the model are built is it known whether a pattern matches nothing",
    ),
)
