"""Encode and decode-and-sum on CPUs, compiled from ``cpu_kernels.cpp``: one pass over memory, all threads of torch.

Equal to :mod:`megatron_loco.kernels.reference` bit for bit: codes, scales, stored error, exact values and sums
(statistics up to their last bits).
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from megatron_loco.core.error_feedback import ErrorState, step_hash
from megatron_loco.core.quantize import max_code
from megatron_loco.core.wire import BucketLayout
from megatron_loco.kernels.cpu_build import load_kernels
from megatron_loco.kernels.tables import PerLayout, Table, make_table

STREAM_BYTES = 2**22
"""Shards from this size on are written past the caches: they will not be there any more when the optimizer reads them.
Measured (``python -m megatron_loco.bench.kernels``): a third to a half of the time of a decode."""

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Table(ctypes.Structure):
    _fields_ = (
        ("runs", ctypes.c_void_p),
        ("num_runs", ctypes.c_int64),
        ("exact", ctypes.c_void_p),
        ("num_exact", ctypes.c_int64),
        ("zeros", ctypes.c_void_p),
        ("num_zeros", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
    )


class _Encode(ctypes.Structure):
    _fields_ = (
        ("table", _Table),
        ("grad", ctypes.c_void_p),
        ("error_codes", ctypes.c_void_p),
        ("error_scales", ctypes.c_void_p),
        ("send", ctypes.c_void_p),
        ("fixed_scale", ctypes.c_void_p),
        ("statistics", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("error_bits", ctypes.c_int32),
        ("reset", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("beta", ctypes.c_float),
        ("one_minus_beta", ctypes.c_float),
        ("inverse_limit", ctypes.c_float),
        ("inverse_error_limit", ctypes.c_float),
        ("step_hash", ctypes.c_uint32),
    )


class _Decode(ctypes.Structure):
    _fields_ = (
        ("table", _Table),
        ("recv", ctypes.c_void_p),
        ("payload_bytes", ctypes.c_int64),
        ("output", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("world_size", ctypes.c_int32),
        ("divisor", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("streams", ctypes.c_int32),
    )


class CpuBackend:
    """See the module's docstring; implements :class:`megatron_loco.kernels.schema.Backend`.

    The number of threads is torch's (``torch.set_num_threads``, ``OMP_NUM_THREADS``), and changes no result.

    Args:
        machine_flags: What to compile for, as flags of the compiler; default: this machine.

    Raises:
        BuildError: the kernels cannot be compiled.
    """

    name = "cpu"

    def __init__(self, machine_flags: tuple[str, ...] = ()) -> None:
        self._kernels = load_kernels(machine_flags)
        self._tables = PerLayout(make_table)

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
        arguments = _Encode(
            table=_table(self._tables.encode(layout)),
            grad=grad.data_ptr(),
            error_codes=error.codes.data_ptr(),
            error_scales=error.scales.data_ptr(),
            send=send.data_ptr(),
            fixed_scale=None if fixed_scale is None else fixed_scale.data_ptr(),
            statistics=statistics.data_ptr(),
            dtype=_DTYPES[grad.dtype],
            bits=layout.bits,
            block_size=layout.block_size,
            error_bits=error.bits,
            reset=reset,
            num_threads=torch.get_num_threads(),
            # Rounded to fp32 once, as core.quantize.fp32 does.
            beta=beta,
            one_minus_beta=1.0 - beta,
            inverse_limit=1.0 / max_code(min(layout.bits, 8)),
            inverse_error_limit=1.0 / max_code(error.bits) if error.bits in (8, 16) else 0.0,
            step_hash=step_hash(step),
        )
        self._kernels.loco_encode(ctypes.byref(arguments))

    def decode_sum(self, recv: Tensor, layout: BucketLayout, rank: int, output: Tensor, *, divisor: int) -> None:
        """Sum what arrived; arguments as in :meth:`Backend.decode_sum`."""
        arguments = _Decode(
            table=_table(self._tables.decode(layout, rank)),
            recv=recv.data_ptr(),
            payload_bytes=layout.shards[rank].payload_bytes,
            output=output.data_ptr(),
            dtype=_DTYPES[output.dtype],
            bits=layout.bits,
            block_size=layout.block_size,
            world_size=layout.world_size,
            divisor=divisor,
            num_threads=torch.get_num_threads(),
            streams=output.numel() * output.element_size() >= STREAM_BYTES,
        )
        self._kernels.loco_decode_sum(ctypes.byref(arguments))


def _table(table: Table) -> _Table:
    return _Table(
        runs=table.runs.data_ptr(),
        num_runs=table.runs.shape[0],
        exact=table.exact.data_ptr(),
        num_exact=table.exact.shape[0],
        zeros=table.zeros.data_ptr(),
        num_zeros=table.zeros.shape[0],
        num_blocks=table.num_blocks,
    )
