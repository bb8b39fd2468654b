"""Encode and decode-and-sum on CUDA devices with Triton; on the CPU with Triton's interpreter, for tests.

At most two launches per encode and per decode, whatever the layout. Nothing is allocated, copied from the host or
waited for after the first call with a layout; all runs on the current stream.

CUDA graphs can capture both operations once each layout was used outside a capture. A graph repeats what it was
captured with: ``step``, ``beta``, ``reset`` and ``divisor`` are plain arguments of the kernels (``fixed_scale`` is read
from its tensor at each replay).

Between its two launches an encode keeps partial sums of the statistics, in memory that belongs to backend and layout:
encodes of one layout by one backend must not overlap on different streams.

Results equal the reference, bit for bit, but for the last bits of the statistics: those add up in fp32 inside a block,
of values brought close to 1 by a power of two, and in fp64 over blocks, in an order that is always the same. Residuals
below 2^-60 of their block's largest ``|h|`` count as 0 in them.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from megatron_loco.core.error_feedback import ErrorState, step_hash
from megatron_loco.core.wire import ALIGNMENT_BYTES, SCALE_BYTES, BucketLayout
from megatron_loco.kernels.tables import PerLayout
from megatron_loco.kernels.triton_plan import make_plan
from megatron_loco.kernels.triton_settings import (
    GAPS_PER_PROGRAM,
    decode_rest_settings,
    decode_settings,
    division,
    encode_rest_settings,
    encode_settings,
)

_MODULES = [f"megatron_loco.kernels.triton_{name}" for name in ("numeric", "encode", "decode")]


class TritonBackend:
    """See the module's docstring; implements :class:`megatron_loco.kernels.schema.Backend`.

    Args:
        device: Of all tensors: a CUDA device, or the CPU with ``interpret``.
        interpret: Run the kernels in Triton's interpreter, at about 0.1 million elements per second. Default: what the
            environment variable ``TRITON_INTERPRET`` says.

    Raises:
        ValueError: Triton is not installed, or cannot run on the device.
    """

    name = "triton"

    def __init__(self, device: torch.device, interpret: bool | None = None) -> None:
        try:
            from triton import knobs
        except ImportError as error:
            raise ValueError(
                "--loco-backend triton: Triton is not installed; install it, or use --loco-backend reference"
            ) from error
        if interpret is None:
            interpret = bool(knobs.runtime.interpret)
        if device.type != "cuda" and not interpret:
            raise ValueError(
                f"--loco-backend triton needs a CUDA device, got {device.type}; use --loco-backend reference, or set "
                "TRITON_INTERPRET=1 to run the kernels in Triton's interpreter (slow, for tests)"
            )
        self._device = device
        self._kernels = load_kernels(interpret)
        self._plans = PerLayout(lambda layout, rank: make_plan(layout, rank, device))

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
        """Write payloads and update the error; arguments as in :meth:`Backend.encode`."""
        _check_start("send", send)
        plan = self._plans.encode(layout)
        num_programs, num_exact, num_gaps = len(plan.programs), len(plan.exact), len(plan.zeros)
        with self._on_device():
            if num_programs:
                self._kernels.encode_blocks[(num_programs,)](
                    grad,
                    error.codes if error.bits else None,
                    error.scales if error.bits in (8, 16) else None,
                    send,
                    fixed_scale,
                    plan.programs,
                    plan.partials,
                    _signed(step_hash(step)),
                    float(beta),
                    float(1.0 - beta),
                    int(reset),
                    **encode_settings(layout.block_size, layout.bits, error.bits, fixed_scale is not None, plan.unit),
                )
            if num_programs or num_exact:
                self._kernels.encode_rest[(1 + num_exact + -(-num_gaps // GAPS_PER_PROGRAM),)](
                    grad,
                    send,
                    plan.exact,
                    plan.zeros,
                    plan.partials,
                    statistics,
                    num_exact,
                    num_gaps,
                    num_programs,
                    **encode_rest_settings(plan.exact_unit),
                )

    def decode_sum(self, recv: Tensor, layout: BucketLayout, rank: int, output: Tensor, *, divisor: int) -> None:
        """Sum what arrived; arguments as in :meth:`Backend.decode_sum`."""
        _check_start("recv", recv)
        plan = self._plans.decode(layout, rank)
        payload_units = layout.shards[rank].payload_bytes // ALIGNMENT_BYTES
        divide, factor = division(divisor)
        num_programs, num_exact, num_zeros = len(plan.programs), len(plan.exact), len(plan.zeros)
        with self._on_device():
            if num_programs:
                self._kernels.decode_blocks[(num_programs,)](
                    recv,
                    output,
                    plan.programs,
                    layout.world_size,
                    payload_units,
                    factor,
                    **decode_settings(layout.block_size, layout.bits, plan.unit, divide),
                )
            if num_exact or num_zeros:
                self._kernels.decode_rest[(num_exact + num_zeros,)](
                    recv,
                    output,
                    plan.exact,
                    plan.zeros,
                    num_exact,
                    layout.world_size,
                    payload_units,
                    factor,
                    **decode_rest_settings(plan.exact_unit, divide),
                )

    def _on_device(self) -> AbstractContextManager[object]:
        # Triton launches on the current device, which need not be that of the tensors.
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


@cache
def load_kernels(interpret: bool) -> SimpleNamespace:
    """Return the kernels by name, to be compiled for a device or, with ``interpret``, run by the interpreter.

    Triton decides between the two when ``@triton.jit`` runs, by a setting of the process. Each kind is a copy of the
    modules of its own, so that both can be used in one process.
    """
    from triton import knobs

    before = {name: sys.modules.pop(name, None) for name in _MODULES}
    try:
        with knobs.runtime.scope():
            knobs.runtime.interpret = interpret
            _, encode, decode = [importlib.import_module(name) for name in _MODULES]
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
    return SimpleNamespace(
        encode_blocks=encode.encode_blocks,
        encode_rest=encode.encode_rest,
        decode_blocks=decode.decode_blocks,
        decode_rest=decode.decode_rest,
    )


def _check_start(name: str, buffer: Tensor) -> None:
    if buffer.data_ptr() % SCALE_BYTES:
        raise ValueError(f"{name} must start at a multiple of {SCALE_BYTES} bytes: it holds fp32 scales")


def _signed(number: int) -> int:
    # A 32-bit pattern as int32: kernels are compiled anew for integers beyond its range.
    return number - 2**32 if number >= 2**31 else number
