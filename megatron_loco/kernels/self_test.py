"""Holds a backend to the reference on a few blocks before it is used: a compiler or a driver that breaks the rules of
floating point would otherwise show as a worse loss, days later."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_loco.core.error_feedback import ErrorState
from megatron_loco.core.wire import BucketLayout, ParamSpan, bucket_layout
from megatron_loco.kernels.reference import ReferenceBackend
from megatron_loco.kernels.schema import NUM_STATISTICS, Backend

_BLOCK_SIZE = 64
_NUMEL = 2 * (9 * _BLOCK_SIZE + 7)


def differences(backend: Backend, device: torch.device) -> list[str]:
    """Return what ``backend`` computes differently from the reference on ``device``; empty if nothing.

    Two steps of bf16 gradients with 1, 4 and 8 bits and an error of 8 and 16: whole and partial blocks, exact values,
    padding, ties, zeros and NaN. Moves a few kilobytes and waits for the device.
    """
    found = []
    for bits, error_bits in ((4, 8), (8, 16), (1, 8)):
        layout = bucket_layout(
            _NUMEL,
            2,
            [ParamSpan(0, 5, True), ParamSpan(5, _NUMEL - 3, False)],
            bits=bits,
            block_size=_BLOCK_SIZE,
            exact_itemsize=torch.bfloat16.itemsize,
        )
        expected = _run(ReferenceBackend(), layout, error_bits, torch.device("cpu"))
        results = _run(backend, layout, error_bits, device)
        for name, tensor in results.items():
            # As bytes, so that equal NaN are equal; but which NaN a sum of NaN is, is nobody's business.
            a, b = (t.nan_to_num(-1.0) if name == "sums" else t for t in (tensor.cpu(), expected[name]))
            if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                found.append(f"{name} of {bits} bits with an error of {error_bits} bits")
    return found


def _run(backend: Backend, layout: BucketLayout, error_bits: int, device: torch.device) -> dict[str, Tensor]:
    error = ErrorState.zeros(layout.error_rows, layout.block_size, device, error_bits)
    send = torch.full((layout.send_bytes,), 0xFF, dtype=torch.uint8, device=device)
    statistics = torch.zeros(NUM_STATISTICS, dtype=torch.float64, device=device)
    for step in range(2):
        grad = torch.randn(layout.numel, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
        grad[100:200] = 0.0
        grad[300:364] = (torch.arange(64) % 15 - 7) * 0.5  # halves of a code step
        if step:
            grad[700] = torch.nan
        backend.encode(grad.to(device), error, layout, send, step=step, beta=0.8, reset=False, statistics=statistics)
    sums = []
    for rank in range(2):
        start = layout.send_offsets[rank]
        recv = send[start : start + layout.send_splits[rank]].repeat(2)
        output = torch.full((layout.shard_numel,), torch.nan, dtype=torch.bfloat16, device=device)
        backend.decode_sum(recv, layout, rank, output, divisor=3)
        sums.append(output)
    return {"payloads": send, **{f"error {k}": t for k, t in error.tensors().items()}, "sums": torch.cat(sums)}
