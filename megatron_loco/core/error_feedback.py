"""The compensation of LoCo: add the stored error, and average the new one into it.

``h = g + e`` travels as ``d``; what was not sent, ``r = h - d``, is averaged into the stored error,
``e' = beta * e + (1 - beta) * r``. It follows that ``d_t = g_t + (e_t - e_{t+1}) / (1 - beta)``: summed over steps
nothing of the gradient is lost, it only arrives late. The error is stored in ``bits`` of 8 or 16 (codes with one fp32
scale per block), of 32 (as it is), or, for comparison, not at all (0: ``h = g``, and what is rounded away is lost).

Storing must not lose anything on average either. An element whose error grows by less than half a storage step per
optimizer step would be rounded back for ever and never be sent (with ``beta = 0.8`` and 8 bits: gradients below about
1/700 of the block's largest). So codes are rounded with a dither that is uniform in ``(0, 1)`` and unforeseeable from
step to step (:func:`storage_dither`): every element is stored without bias, and still as a function of step and
position alone.

For 16 bits this holds up to the rounding of ``x + dither`` in fp32, which carries an element upwards by half the
spacing of fp32 numbers around it on average: at most ``2^-10`` code steps (for ``|x|`` from 16384 on), or ``2^-24
|x|``: one rounding of fp32, as every operation here makes. For 8 bits the sum is exact where that matters: the spacing
below 128 is the ``2^-17`` of the dither.

With 2 bits or more and a scale per block, the error is at most half a step of what travels. Of signs it can be many
times the gradient (what is far above its block's mean waits), and a step of 8-bit storage then many times a small
gradient: take 16 bits.

Source: LoCo (arXiv 2407.04480), moving average as in DeepSpeed PR 6730 (``err_beta``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_loco.core.quantize import dequantize_blocks, fp32, quantize_blocks

CODE_DTYPES = {0: torch.int8, 8: torch.int8, 16: torch.int16, 32: torch.float32}
"""Width of the stored error -> dtype of its codes."""

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
    """Return the stored error in fp32, shape ``[num_blocks, block_size]``; of 32 bits, the stored tensor itself."""
    return error.codes if error.bits == 32 else dequantize_blocks(error.codes, error.scales)


def storage_dither(step: int, first_block: int, num_blocks: int, block_size: int, device: torch.device) -> Tensor:
    """Return the dither of the stored error of some blocks in one step.

    Over the elements of one step it is evenly spread, a lattice with an irrational stride; from step to step the
    lattice is shifted by a hash of the step. It needs no generator and no state, and is the same on every rank and
    backend. In 32-bit integer arithmetic, with ``element`` the index of the position in the error state::

        u = (uint32(hash(step) + element * 0x91E10DA5) >> 16) * 2^-16 + 2^-17

    Evenly spread steps in place of the hash (a lattice in two dimensions) would be biased: error feedback is a loop,
    and what is stored depends on the dither of the steps before. With signs and ``beta = 0.8`` some elements were then
    pushed the same way at every step, by a tenth of a storage step.

    Source: the stride is ``2^32 / 1.7549`` (the square of the real root of ``x^3 = x + 1``), from M. Roberts, "The
    Unreasonable Effectiveness of Quasirandom Sequences" (2018); shift of a lattice: Cranley and Patterson (1976); hash:
    :func:`step_hash`.

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
    phase = (element * _ELEMENT_STRIDE + step_hash(step)).bitwise_and(2**32 - 1)
    top = (phase >> (32 - _DITHER_BITS)).to(torch.float32)
    return ((top + 0.5) * 2.0**-_DITHER_BITS).view(num_blocks, block_size)


def step_hash(step: int) -> int:
    """Return the shift of the dither in one step: a 32-bit hash of ``step`` modulo 2^32.

    Computed once per call and not per element, so that kernels receive it as a number.
    Source: ``lowbias32`` of C. Wellons, "Prospecting for Hash Functions" (2018), public domain.
    """
    x = step % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def update_error(
    error: ErrorState, old: Tensor, residual: Tensor, finite: Tensor, beta: float, dither: Tensor | None
) -> Tensor:
    """Store ``beta * old + (1 - beta) * residual`` in the blocks of ``error``, in place.

    Args:
        error: Where to store, in 8, 16 or 32 bits.
        old: The error that was added in this step (:func:`load_error`), fp32 ``[num_blocks, block_size]``.
        residual: ``h - d`` of this step, same shape and dtype.
        finite: bool ``[num_blocks]``; blocks that are not finite keep their old error, which is finite, bit for bit.
        beta: Weight of the old error.
        dither: :func:`storage_dither` of these blocks and this step; not used for 32 bits.

    Returns:
        The new error in fp32 before its rounding to ``error.bits``, same shape as ``old``.
    """
    updated = old * fp32(beta) + residual * fp32(1.0 - beta)
    updated = torch.where(finite[:, None], updated, old)
    if error.bits == 32:
        error.codes.copy_(updated)
        return updated
    assert dither is not None  # integer codes without it would lose small gradients
    codes, scales = quantize_blocks(updated, error.bits, dither)
    # Not re-rounded: a block that is kept must stay the same bits.
    error.codes.copy_(torch.where(finite[:, None], codes, error.codes))
    error.scales.copy_(torch.where(finite, scales, error.scales))
    return updated


def reset_error(error: ErrorState) -> None:
    """Set the stored error to zero, in place."""
    error.codes.zero_()
    error.scales.zero_()
