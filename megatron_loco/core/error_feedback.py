"""The compensation of LoCo: add the stored error, and average the new one into it.

``h = g + e`` travels as ``d``; what was not sent, ``r = h - d``, is averaged into the stored error,
``e' = beta * e + (1 - beta) * r``. It follows that ``d_t = g_t + (e_t - e_{t+1}) / (1 - beta)``: summed over steps
nothing of the gradient is lost, it only arrives late. The error is stored as 8-bit codes with one fp32 scale per block.

Storing must not lose anything on average either. An element whose error grows by less than half a storage step per
optimizer step would be rounded back for ever and never be sent (with ``beta = 0.8``: gradients below about 1/700 of the
block's largest). So ``e'`` is rounded with a dither that runs evenly through ``(0, 1)`` from step to step
(:func:`storage_dither`): every element is stored without bias, and still as a function of step and position alone.

Source: LoCo (arXiv 2407.04480), moving average as in DeepSpeed PR 6730 (``err_beta``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_loco.core.quantize import dequantize_blocks, fp32, quantize_blocks

CODE_DTYPES = {0: torch.int8, 8: torch.int8, 16: torch.int16, 32: torch.float32}
"""Width of the stored error -> dtype of its codes."""

_STEP_STRIDE = 0xC13FA9A9
_ELEMENT_STRIDE = 0x91E10DA5
_DITHER_BITS = 16


@dataclass
class ErrorState:
    """Stored compression error of the quantised elements of one bucket, in the unit of the gradients it is added to.

    Attributes:
        codes: Shape ``[num_blocks, block_size]``: int8, int16, or fp32 (the error itself). Positions behind the end of
            a partial block stay 0. Shape ``[0, block_size]`` where no error is kept.
        scales: fp32, shape ``[num_blocks]``, one per block of integer codes; never negative, never non-finite. Shape
            ``[0]`` where the codes are fp32 or no error is kept.
        bits: 8, 16, 32, or 0 where no error is kept.
    """

    codes: Tensor
    scales: Tensor
    bits: int = 8

    @classmethod
    def zeros(cls, num_blocks: int, block_size: int, device: torch.device, bits: int = 8) -> ErrorState:
        """Allocate a state of zero error on ``device``."""
        return cls(
            codes=torch.zeros(num_blocks if bits else 0, block_size, dtype=CODE_DTYPES[bits], device=device),
            scales=torch.zeros(num_blocks if bits in (8, 16) else 0, dtype=torch.float32, device=device),
            bits=bits,
        )

    def rows(self, first: int, last: int) -> ErrorState:
        """A view of blocks ``first`` to ``last - 1``."""
        return ErrorState(self.codes[first:last], self.scales[first:last], self.bits)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that is stored, by name: what a checkpoint or a copy has to hold."""
        return {"codes": self.codes, "scales": self.scales}

    def copy_(self, other: ErrorState) -> None:
        """Take over the contents of another state of the same shape, in place."""
        for name, tensor in self.tensors().items():
            tensor.copy_(other.tensors()[name])

    def multiply_(self, factor: Tensor) -> None:
        """Multiply the error by ``factor``, fp32 of shape ``[]`` on the same device, in place.

        Codes of 8 and 16 bits stay as they are; exact for powers of two as long as nothing underflows.
        """
        (self.codes if self.bits == 32 else self.scales).mul_(factor)

    @property
    def num_bytes(self) -> int:
        """Memory of the state in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())


def load_error(error: ErrorState) -> Tensor:
    """Return the stored error in fp32, shape ``[num_blocks, block_size]``."""
    return dequantize_blocks(error.codes, error.scales)


def storage_dither(step: int, first_block: int, num_blocks: int, block_size: int, device: torch.device) -> Tensor:
    """Return the dither of the stored error of some blocks in one step.

    The two-dimensional low-discrepancy sequence R2 over (step, element) in 32-bit integer arithmetic: for a fixed
    element it visits ``(0, 1)`` evenly over the steps, for a fixed step evenly over the elements. It needs no generator
    and no state, and is the same on every rank and backend. With ``element`` the index of the position in the error
    state::

        u = (uint32(step * 0xC13FA9A9 + element * 0x91E10DA5) >> 16) * 2^-16 + 2^-17

    Source: M. Roberts, "The Unreasonable Effectiveness of Quasirandom Sequences" (2018); the strides are 2^32 times the
    powers of 1/1.3247 (the real root of ``x^3 = x + 1``), made odd.

    Args:
        step: Optimizer step.
        first_block: Index of the first block in the bucket.
        num_blocks: Number of blocks.
        block_size: Elements per block.
        device: Where to compute.

    Returns:
        fp32, shape ``[num_blocks, block_size]``, multiples of ``2^-17`` in ``(0, 1)``.
    """
    first = first_block * block_size
    element = torch.arange(first, first + num_blocks * block_size, dtype=torch.int64, device=device)
    # int64 wraps modulo 2^64, of which the low 32 bits are the uint32 result.
    phase = (element * _ELEMENT_STRIDE + (step * _STEP_STRIDE) % 2**32).bitwise_and(2**32 - 1)
    top = (phase >> (32 - _DITHER_BITS)).to(torch.float32)
    return ((top + 0.5) * 2.0**-_DITHER_BITS).view(num_blocks, block_size)


def update_error(
    error: ErrorState, old: Tensor, residual: Tensor, finite: Tensor, beta: float, dither: Tensor
) -> Tensor:
    """Store ``beta * old + (1 - beta) * residual`` in the blocks of ``error``, in place.

    Args:
        error: Where to store.
        old: The error that was added in this step (:func:`load_error`), fp32 ``[num_blocks, block_size]``.
        residual: ``h - d`` of this step, same shape and dtype.
        finite: bool ``[num_blocks]``; blocks that are not finite keep their old error, which is finite.
        beta: Weight of the old error.
        dither: :func:`storage_dither` of these blocks and this step.

    Returns:
        The new error in fp32 before its rounding to 8 bits, same shape as ``old``.
    """
    updated = old * fp32(beta) + residual * fp32(1.0 - beta)
    updated = torch.where(finite[:, None], updated, old)
    codes, scales = quantize_blocks(updated, error.bits, dither)
    # Not re-rounded: a block that is kept must stay the same bits.
    error.codes.copy_(torch.where(finite[:, None], codes, error.codes))
    error.scales.copy_(torch.where(finite, scales, error.scales))
    return updated


def reset_error(error: ErrorState) -> None:
    """Set the stored error to zero, in place."""
    error.codes.zero_()
    error.scales.zero_()
