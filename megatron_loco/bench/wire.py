"""Bytes on the wire of one gradient reduction, counted by the kernel at the network interface, against the formula.

``python -m megatron_loco.bench.wire [--ranks 2] [--bits 4] [--block-size 256] [--json]``

Ranks are processes of this machine that reduce one bucket shaped like a LLaMA layer over Gloo; all that they send
crosses the loopback interface, whose byte counter is read before and after. They run in a network namespace of their
own, so that nobody else's traffic is counted; where that is not allowed, the output says so. The formula is, per
element and rank, ``(bits + 32 / block_size) * quantised share + 8 * itemsize * exact share``, times ``(W - 1) / W``.
The counter also sees packet headers and acknowledgements (0.1 to 1 %). The result is compared with an exact reduction
first. Linux only.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import os
import platform
import socket
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from megatron_loco.collectives.reduce_scatter import reduce_scatter
from megatron_loco.collectives.scratch import ScratchPool
from megatron_loco.collectives.state import BucketState
from megatron_loco.config import LoCoConfig
from megatron_loco.core.wire import ParamSpan, bucket_layout

COUNTER = Path("/proc/net/dev")
"""Counters of the interfaces of the reader's network namespace."""
HIDDEN, FFN, KV_HIDDEN = 1024, 2816, 256
"""A LLaMA layer with grouped-query attention: large enough that padding and headers vanish."""
REPEATS = 5


def layer_spans() -> tuple[list[ParamSpan], int]:
    """Return the parameters of the layer and the elements that they take, each start padded to 64 as Megatron does."""
    shapes = (
        ((HIDDEN,), True),
        ((HIDDEN + 2 * KV_HIDDEN, HIDDEN), False),
        ((HIDDEN, HIDDEN), False),
        ((HIDDEN,), True),
        ((2 * FFN, HIDDEN), False),
        ((HIDDEN, FFN), False),
    )
    spans, start = [], 0
    for shape, exact in shapes:
        stop = start + int(torch.Size(shape).numel())
        spans.append(ParamSpan(start, stop, exact))
        start = -(-stop // 64) * 64
    return spans, start


def measure(rank: int, world_size: int, folder: str, config: LoCoConfig) -> None:
    """Body of one rank; rank 0 writes ``result.json`` into ``folder``.

    Raises:
        RuntimeError: the compressed sum is not close to the exact one; nothing was measured.
    """
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    group = dist.group.WORLD
    assert group is not None
    spans, numel = layer_spans()
    numel = -(-numel // (128 * world_size)) * 128 * world_size
    device, dtype = torch.device("cpu"), torch.float32
    layout = bucket_layout(
        numel, world_size, spans, bits=config.bits, block_size=config.block_size, exact_itemsize=dtype.itemsize
    )
    state = BucketState("layer", layout, config, device, ScratchPool(device))
    grad = torch.zeros(numel)
    for index, span in enumerate(spans):
        generator = torch.Generator().manual_seed(1000 * rank + index)
        grad[span.start : span.stop] = torch.randn(span.stop - span.start, generator=generator)
    output = torch.empty(numel // world_size)

    def loco() -> None:
        reduce_scatter(output, grad, state, op=dist.ReduceOp.SUM, group=group)

    def stock() -> None:
        dist.reduce_scatter_tensor(output, grad, group=group)

    stock()
    exact = output.clone()
    loco()
    error = ((output - exact).norm() / exact.norm()).item()
    # Gaussian blocks of 256 reach about 2.9 sigma, so a 4-bit step is 0.41 sigma and its error 0.41 / sqrt(12) = 0.12;
    # a wrong shard or scale gives 1 and more.
    if not error < 0.3:
        raise RuntimeError(f"rank {rank}: the reduction is wrong, relative error {error:.3f}; nothing was measured")
    result = {
        "numel": numel,
        "relative_error": error,
        "formula_bytes": layout.wire_bytes,
        "counted_bytes": _interface_bytes(loco, group) / world_size,
        "ring_fp32_bytes": layout.ring_bytes(dtype.itemsize),
        "stock_gloo_fp32_bytes": _interface_bytes(stock, group) / world_size,
    }
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def enter_private_network() -> bool:
    """Move this process into a network namespace with only a loopback interface; say whether that was allowed."""
    try:
        os.unshare(os.CLONE_NEWNET if os.geteuid() == 0 else os.CLONE_NEWUSER | os.CLONE_NEWNET)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            up_and_running = 0x1 | 0x40  # IFF_UP, IFF_RUNNING of <linux/if.h>
            fcntl.ioctl(probe, 0x8914, struct.pack("16sh", b"lo", up_and_running))  # SIOCSIFFLAGS
    except OSError:
        return False
    return True


def _loopback_bytes() -> int:
    for line in COUNTER.read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == "lo":
            return int(fields.split()[8])  # the transmitted bytes, after eight fields of what was received
    raise RuntimeError(f"{COUNTER} shows no interface lo")


def _interface_bytes(collective: Callable[[], None], group: dist.ProcessGroup) -> float:
    collective()
    dist.barrier(group=group)
    before = _loopback_bytes()
    dist.barrier(group=group)
    for _ in range(REPEATS):
        collective()
    dist.barrier(group=group)
    after = _loopback_bytes()
    dist.barrier(group=group)
    return (after - before) / REPEATS


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m megatron_loco.bench.wire", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args(argv)
    if not COUNTER.exists():
        print(f"error: {COUNTER} does not exist; this measurement needs Linux", file=sys.stderr)
        return 2
    try:
        if args.ranks < 2:
            raise ValueError(f"--ranks must be at least 2, got {args.ranks}: one rank sends nothing")
        config = LoCoConfig(bits=args.bits, block_size=args.block_size, warmup_steps=0)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    private = enter_private_network()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=measure, args=(r, args.ranks, folder, config)) for r in range(args.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            return 1
        result = json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))
    result |= {"private_network": private, "ranks": args.ranks, "bits": args.bits, "block_size": args.block_size}
    print(json.dumps(result)) if args.json else _print_table(result)
    return 0


def _print_table(result: dict[str, float]) -> None:
    console = Console()
    console.print(
        f"torch {torch.__version__}, {platform.machine()}, {result['ranks']} Gloo ranks, {result['numel']} elements"
    )
    leaving = result["numel"] * (result["ranks"] - 1) / result["ranks"]
    table = Table("per rank and reduction", "bytes", "bits per element that leaves the rank")
    for name in ("formula_bytes", "counted_bytes", "ring_fp32_bytes", "stock_gloo_fp32_bytes"):
        label = name.removesuffix("_bytes").replace("_", " ")
        table.add_row(label, f"{result[name]:,.0f}", f"{8 * result[name] / leaving:.3f}")
    console.print(table)
    if not result["private_network"]:
        console.print("no private network namespace allowed here: other local traffic was counted too")
    console.print(
        f"counted / formula: {result['counted_bytes'] / result['formula_bytes']:.4f}; "
        f"relative error of one compressed sum: {result['relative_error']:.3f}"
    )


if __name__ == "__main__":
    sys.exit(main())
