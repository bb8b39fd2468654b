"""The two operations that a backend implements, and the one place that checks their tensors."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron_loco.core.error_feedback import CODE_DTYPES, ErrorState
from megatron_loco.core.wire import BucketLayout

GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUM_STATISTICS = 4
"""Sums that encode adds up per bucket: ``[g^2, (h - d)^2, e'^2, blocks with NaN or Inf]``; see :class:`Statistics`."""


class Statistics:
    """Names of the entries of a statistics tensor (fp64, shape ``[NUM_STATISTICS]``), summed over finite blocks.

    Only elements of the bucket count, not what fills up partial blocks. Without error ``ERROR_SQ`` is 0.
    """

    GRAD_SQ = 0
    RESIDUAL_SQ = 1
    ERROR_SQ = 2
    NONFINITE_BLOCKS = 3


class Backend(Protocol):
    """An implementation of both operations on the devices that it supports."""

    name: str

    def encode(
        self,
        grad: Tensor,
        error: ErrorState,
        layout: BucketLayout,
        send: Tensor,
        *,
        step: int,
        beta: float,
        reset: bool,
        statistics: Tensor,
        fixed_scale: Tensor | None = None,
    ) -> None:
        """Write the payloads of all shards and update the error of their blocks.

        Args:
            grad: The bucket, shape ``[layout.numel]``, contiguous; not written.
            error: Error state of the whole bucket, updated in place; without error (0 bits), ``h = g``.
            layout: Byte layout of the bucket or of a chunk of it; only the chunk's part of the error is touched.
            send: uint8, shape ``[layout.send_bytes]``; every byte is written.
            step: Optimizer step, for the dither of the stored error.
            beta: Weight of the old error.
            reset: Whether this step sets the error to zero instead of updating it.
            statistics: fp64 ``[NUM_STATISTICS]``, added to in place.
            fixed_scale: One scale for all blocks instead of one each (:func:`megatron_loco.core.quantize.fixed_scale`);
                fp32, shape ``[]``, on the device of ``grad``.
        """

    def decode_sum(self, recv: Tensor, layout: BucketLayout, rank: int, output: Tensor, *, divisor: int) -> None:
        """Decode one payload from every rank, sum in fp32 in rank order, divide, and write the shard of ``rank``.

        Args:
            recv: uint8, shape ``[layout.recv_bytes(rank)]``: payloads in rank order.
            layout: Byte layout of the bucket or of a chunk of it.
            rank: Whose shard it is.
            output: The whole shard, shape ``[layout.shard_numel]``, dtype of the bucket; every element of the layout's
                part of it is written (of a whole bucket: every element).
            divisor: 1 for a sum, the size of the group for an average.
        """


def check_encode(grad: Tensor, error: ErrorState, layout: BucketLayout, send: Tensor) -> None:
    """Check shapes, dtypes, contiguity and devices of an encode.

    Raises:
        ValueError: naming the tensor and what it should be.
    """
    check_gradient(grad, layout.numel)
    _check("send", send, (layout.send_bytes,), (torch.uint8,))
    num_rows = layout.error_rows if error.bits else 0
    _check("error.codes", error.codes, (num_rows, layout.block_size), (CODE_DTYPES[error.bits],))
    _check("error.scales", error.scales, (num_rows if error.bits in (8, 16) else 0,), (torch.float32,))
    if grad.element_size() != layout.exact_itemsize:
        raise ValueError(
            f"grad has {grad.element_size()}-byte elements, the layout was made for {layout.exact_itemsize}"
        )
    if len({grad.device, send.device, error.codes.device, error.scales.device}) != 1:
        raise ValueError(f"grad, send and error must be on one device, got {grad.device} and {error.codes.device}")


def check_gradient(grad: Tensor, numel: int) -> None:
    """Check shape, dtype and contiguity of a bucket's gradients.

    Raises:
        ValueError: saying what they should be.
    """
    _check("grad", grad, (numel,), GRAD_DTYPES)


def check_reduction(output: Tensor, grad: Tensor, numel: int, layout: BucketLayout) -> None:
    """Check what a reduction is called with: the gradients of a bucket and the shard that takes the result.

    Args:
        output: The shard.
        grad: The gradients.
        numel: Elements of the bucket.
        layout: Byte layout of what is exchanged.

    Raises:
        ValueError: naming the tensor and what it should be.
    """
    check_gradient(grad, numel)
    if grad.element_size() != layout.exact_itemsize:
        raise ValueError(
            f"grad has {grad.element_size()}-byte elements, the layout was made for {layout.exact_itemsize}"
        )
    _check("output", output, (layout.shard_numel,), (grad.dtype,))


def check_decode(recv: Tensor, layout: BucketLayout, rank: int, output: Tensor) -> None:
    """Check shapes, dtypes, contiguity and devices of a decode.

    Raises:
        ValueError: naming the tensor and what it should be.
    """
    _check("recv", recv, (layout.recv_bytes(rank),), (torch.uint8,))
    _check("output", output, (layout.shard_numel,), GRAD_DTYPES)
    if output.element_size() != layout.exact_itemsize:
        raise ValueError(
            f"output has {output.element_size()}-byte elements, the layout was made for {layout.exact_itemsize}"
        )
    if recv.device != output.device:
        raise ValueError(f"recv and output must be on one device, got {recv.device} and {output.device}")


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
