"""Gloo's binding of ``all_to_all_single`` wants Python integers where Megatron passes tensors on CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from megatron_loco.patching import Patch


def _integers(sizes: Iterable[Any] | None) -> list[int] | None:
    return None if sizes is None else [int(size) for size in sizes]


def integer_split_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``torch.distributed.all_to_all_single`` so that split sizes may be tensors (int64, one per rank).

    Needed by the MoE token dispatcher: ``maybe_move_tensor_to_cpu`` in ``megatron.core.transformer.moe.moe_utils``
    turns split sizes to numpy only if they are on a GPU, and ``_AllToAll.forward`` passes on what it gets.
    """

    def all_to_all_single(
        output: Any,
        input: Any,
        output_split_sizes: Iterable[Any] | None = None,
        input_split_sizes: Iterable[Any] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return original(
            output,
            input,
            output_split_sizes=_integers(output_split_sizes),
            input_split_sizes=_integers(input_split_sizes),
            group=group,
            async_op=async_op,
        )

    return all_to_all_single


PATCHES = (
    Patch(
        target="torch.distributed:all_to_all_single",
        kind="wrap",
        new=integer_split_sizes,
        why="the MoE dispatcher passes split sizes as CPU tensors, which the binding refuses",
        parameters=("output", "input", "output_split_sizes", "input_split_sizes", "group", "async_op"),
    ),
)
