"""Encode and decode-and-sum of every backend, in GB/s of gradient and as a share of what memory allows.

``python -m megatron_loco.bench.kernels [--buckets NAME ...] [--dtypes bf16 fp32] [--threads 1 2] [--json PATH]``

For buckets of named LLaMA layers, 4 bits and 8-bit error unless said otherwise:

* *floor*: the least bytes that an operation has to move over the copy rate. Encode reads the gradient, reads and writes
  the error and writes codes (bf16: ``2 + 1 + 1 + 0.5 = 4.5`` per element); decode-and-sum reads ``ranks * 0.5`` bytes
  per element of the shard and writes it (scales, a few per cent, are left out of both). The copy rate is that of
  ``torch.Tensor.copy_`` of the bucket's gradients, read and written bytes, measured in turn with the operations.
* *share*: the floor over the time. 1.0 would be a kernel that costs nothing but its memory traffic.
* *x reference*: how many times faster than plain PyTorch (``reference``), measured on the same bucket.

The buffers rotate through enough sets to exceed the caches (``--working-set-mb``), as between two steps of a training.
Nothing is timed before a backend gave the reference's bits: codes, scales, stored error and sums of the first elements
of the bucket. Medians, and in brackets the middle half, of ``--repeats`` rounds in which copy, encode and decode take
turns; the reference, which is slow, is timed in as many rounds as fit in ten seconds, at least two.

On a GPU (``--device cuda``) times are those of CUDA events, and ``--threads`` does not matter.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby, product
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron_loco.bench.machine import describe_machine
from megatron_loco.core.error_feedback import CODE_DTYPES, ErrorState
from megatron_loco.core.wire import BucketLayout, ParamSpan, bucket_layout
from megatron_loco.kernels.reference import ReferenceBackend
from megatron_loco.kernels.registry import select_backend
from megatron_loco.kernels.schema import NUM_STATISTICS, Backend
from megatron_loco.kernels.self_test import differences

BUCKETS = {
    # Parameters of a layer as Megatron holds them: one matrix each for QKV and for gate and up.
    "quickstart": [(128, 256), (128, 128), (128, 704), (352, 128)] * 4 + [(257, 128)] * 2,
    "llama3-8b-attention": [(4096, 6144), (4096, 4096)],
    "llama2-7b-attention": [(4096, 12288), (4096, 4096)],
    "llama2-7b-mlp": [(4096, 22016), (11008, 4096)],
    "llama3-8b-mlp": [(4096, 28672), (14336, 4096)],
    "llama2-70b-attention-tp8": [(8192, 1280), (1024, 8192)],
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
GATE_ELEMENTS = 2**20
REFERENCE_SECONDS = 10.0


@dataclass(frozen=True)
class Case:
    """What is measured: one bucket in one setting."""

    bucket: str
    dtype: str
    threads: int
    bits: int = 4
    error_bits: int = 8
    block_size: int = 256
    world_size: int = 4

    @property
    def encode_bytes(self) -> float:
        """Least traffic of an encode, bytes per element."""
        error = CODE_DTYPES[self.error_bits].itemsize if self.error_bits else 0
        return DTYPES[self.dtype].itemsize + 2 * error + self.bits / 8

    @property
    def decode_bytes(self) -> float:
        """Least traffic of a decode-and-sum, bytes per element of the shard."""
        return self.world_size * self.bits / 8 + DTYPES[self.dtype].itemsize

    def layout(self, limit: int | None = None) -> BucketLayout:
        """The bucket's layout, or that of its first ``limit`` elements."""
        spans, start = [], 0
        for shape in BUCKETS[self.bucket]:
            numel = shape[0] * shape[1]
            spans.append(ParamSpan(start, start + numel, exact=False))
            start += numel
        total = start if limit is None else min(start, limit)
        total -= total % self.world_size
        return bucket_layout(
            total,
            self.world_size,
            [ParamSpan(s.start, min(s.stop, total), False) for s in spans if s.start < total],
            bits=self.bits,
            block_size=self.block_size,
            exact_itemsize=DTYPES[self.dtype].itemsize,
        )


@dataclass
class Buffers:
    """One set of what an operation reads and writes; the operations of a round use one set after another."""

    grad: Tensor
    copy: Tensor
    error: ErrorState
    send: Tensor
    recv: Tensor
    output: Tensor

    @classmethod
    def random(cls, case: Case, layout: BucketLayout, device: torch.device) -> Buffers:
        """Gradients of unit noise, and zero error."""
        generator = torch.Generator().manual_seed(0)
        grad = torch.randn(layout.numel, generator=generator).to(DTYPES[case.dtype]).to(device)
        return cls(
            grad,
            torch.empty_like(grad),
            ErrorState.zeros(layout.error_rows, layout.block_size, device, case.error_bits),
            torch.zeros(layout.send_bytes, dtype=torch.uint8, device=device),
            torch.zeros(layout.recv_bytes(0), dtype=torch.uint8, device=device),
            torch.zeros(layout.shard_numel, dtype=grad.dtype, device=device),
        )

    def receive_own(self, backend: Backend, layout: BucketLayout) -> None:
        """Fill the receive buffer as ranks with these gradients would."""
        encode(backend, layout, self, torch.zeros(NUM_STATISTICS, dtype=torch.float64, device=self.grad.device), 0)
        for payload in self.recv.view(layout.world_size, -1):
            payload.copy_(self.send[: layout.send_splits[0]])

    def copy_grad(self) -> None:
        """The yardstick."""
        self.copy.copy_(self.grad)

    @property
    def num_bytes(self) -> int:
        """Memory of the set."""
        tensors = (self.grad, self.copy, self.send, self.recv, self.output)
        return sum(t.numel() * t.element_size() for t in tensors) + self.error.num_bytes


def encode(backend: Backend, layout: BucketLayout, buffers: Buffers, sums: Tensor, step: int) -> None:
    """One encode of a whole bucket."""
    backend.encode(buffers.grad, buffers.error, layout, buffers.send, step=step, beta=0.8, reset=False, statistics=sums)


def decode(backend: Backend, layout: BucketLayout, buffers: Buffers, divisor: int) -> None:
    """One decode-and-sum of the first shard."""
    backend.decode_sum(buffers.recv, layout, 0, buffers.output, divisor=divisor)


def gate(backend: Backend, case: Case, device: torch.device) -> None:
    """Compare with the reference, bit for bit, before anything is timed.

    Raises:
        RuntimeError: naming what differs.
    """
    wrong = differences(backend, device)
    layout = case.layout(GATE_ELEMENTS)
    results = []
    for each in (backend, ReferenceBackend()):
        buffers = Buffers.random(case, layout, device)
        sums = torch.zeros(NUM_STATISTICS, dtype=torch.float64, device=device)
        for step in range(2):
            encode(each, layout, buffers, sums, step)
        buffers.receive_own(each, layout)
        decode(each, layout, buffers, case.world_size)
        results.append({"payloads": buffers.send, **buffers.error.tensors(), "sums": buffers.output})
    wrong += [name for name, tensor in results[0].items() if not torch.equal(tensor, results[1][name])]
    if wrong:
        raise RuntimeError(f"{backend.name} differs from the reference in {', '.join(wrong)}; nothing was measured")


def seconds_of(operation: Callable[[], object], device: torch.device) -> float:
    """Run it once; CPU: wall time. GPU: between two events on the current stream."""
    if device.type != "cuda":
        before = time.perf_counter()
        operation()
        return time.perf_counter() - before
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    operation()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def measure(
    case: Case, backends: Sequence[str], device: torch.device, *, repeats: int, working_set: int
) -> list[dict[str, Any]]:
    """Measure a case with each backend; see the module's docstring. ``working_set`` in bytes."""
    if device.type == "cpu":
        torch.set_num_threads(case.threads)
    layout = case.layout()
    sets = [Buffers.random(case, layout, device)]
    while sum(buffers.num_bytes for buffers in sets) < working_set:
        sets.append(copy.deepcopy(sets[0]))
    chosen = [select_backend(name, device) for name in backends]
    for backend in chosen:
        gate(backend, case, device)
    for buffers in sets:
        buffers.receive_own(chosen[-1], layout)
    sums = torch.zeros(NUM_STATISTICS, dtype=torch.float64, device=device)
    copies: list[float] = []
    encodes: dict[str, list[float]] = {backend.name: [] for backend in chosen}
    decodes: dict[str, list[float]] = {backend.name: [] for backend in chosen}
    turn = 0
    for step in range(repeats + 1):  # the first is not counted
        for backend in chosen:
            spent = sum(encodes[backend.name]) + sum(decodes[backend.name])
            if backend.name == "reference" and step > 2 and spent > REFERENCE_SECONDS:
                continue
            copying, encoding, decoding = (sets[(turn + k) % len(sets)] for k in range(3))
            turn += 3
            copied = seconds_of(copying.copy_grad, device)
            encoded = seconds_of(partial(encode, backend, layout, encoding, sums, step), device)
            decoded = seconds_of(partial(decode, backend, layout, decoding, 1), device)
            if step:
                copies.append(copied)
                encodes[backend.name].append(encoded)
                decodes[backend.name].append(decoded)
    return [_row(case, layout, backend.name, copies, encodes, decodes, num_sets=len(sets)) for backend in chosen]


def _row(
    case: Case,
    layout: BucketLayout,
    name: str,
    copies: list[float],
    encodes: dict[str, list[float]],
    decodes: dict[str, list[float]],
    *,
    num_sets: int,
) -> dict[str, Any]:
    itemsize = DTYPES[case.dtype].itemsize
    copy_rate = 2 * layout.numel * itemsize / statistics.median(copies)
    row: dict[str, Any] = {
        **asdict(case),
        "numel": layout.numel,
        "backend": name,
        "buffer_sets": num_sets,
        "copy_gb_per_s": copy_rate / 1e9,
    }
    for operation, times, numel, num_bytes in (
        ("encode", encodes, layout.numel, case.encode_bytes),
        ("decode", decodes, layout.shard_numel, case.decode_bytes),
    ):
        median = statistics.median(times[name])
        row[operation] = {
            "seconds": median,
            "quartiles": _quartiles(times[name]),
            "rounds": len(times[name]),
            # Of gradient: for a decode, what all ranks' gradients of the shard would take.
            "gb_per_s": numel * itemsize * (case.world_size if operation == "decode" else 1) / median / 1e9,
            "share_of_floor": numel * num_bytes / copy_rate / median,
            "times_reference": statistics.median(times["reference"]) / median if "reference" in times else None,
        }
    return row


def _quartiles(times: list[float]) -> list[float]:
    if len(times) < 2:
        return [times[0], times[0]]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return [low, high]


def print_rows(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Print one line per case and backend."""
    table = Table("bucket", "operation", "backend", "ms [middle half]", "GB/s", "share", "x reference")
    for column in table.columns[3:]:
        column.justify = "right"
    for (bucket, numel, dtype, threads), group in groupby(
        rows, key=lambda row: (row["bucket"], row["numel"], row["dtype"], row["threads"])
    ):
        of_case = list(group)
        label = (
            f"{bucket}\n{numel / 1e6:.1f} M {dtype}, {threads} thread(s)\ncopy {of_case[0]['copy_gb_per_s']:.1f} GB/s"
        )
        for operation, row in product(("encode", "decode"), of_case):
            figures = row[operation]
            low, high = figures["quartiles"]
            times = figures["times_reference"]
            table.add_row(
                label,
                operation,
                row["backend"],
                f"{figures['seconds'] * 1e3:.2f} [{low * 1e3:.2f}, {high * 1e3:.2f}]",
                f"{figures['gb_per_s']:.2f}",
                f"{figures['share_of_floor']:.2f}",
                "" if times is None else f"{times:.1f}",
            )
            label = ""
        table.add_section()
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 if a backend differs from the reference."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_loco.bench.kernels",
        description="Speed of encode and decode-and-sum against the memory floor.",
        epilog="example: python -m megatron_loco.bench.kernels --buckets llama2-7b-mlp --threads 2 --json kernels.json",
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--buckets", nargs="+", default=["quickstart", "llama3-8b-attention"], choices=BUCKETS)
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"], choices=DTYPES)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="threads of torch (CPU only)")
    parser.add_argument("--backends", nargs="+", help="default: all of the device")
    parser.add_argument("--bits", type=int, default=4, choices=(1, 2, 4, 8))
    parser.add_argument("--error-bits", type=int, default=8, choices=sorted(CODE_DTYPES))
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=4, help="payloads that a decode sums")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--working-set-mb", type=float, default=640.0, help="at least so much memory is gone through")
    parser.add_argument("--json", metavar="PATH", help="write all figures there")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    backends = args.backends or ["reference", "cpu" if device.type == "cpu" else "triton"]
    threads = args.threads if device.type == "cpu" else [torch.get_num_threads()]
    console = Console()
    about = describe_machine(device)
    console.print(", ".join(f"{name} {value}" for name, value in about.items()), highlight=False)
    rows: list[dict[str, Any]] = []
    for bucket, dtype, count in product(args.buckets, args.dtypes, threads):
        case = Case(bucket, dtype, count, args.bits, args.error_bits, args.block_size, args.ranks)
        try:
            working_set = int(args.working_set_mb * 1e6)
            rows += measure(case, backends, device, repeats=args.repeats, working_set=working_set)
        except (RuntimeError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print_rows(console, rows)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"machine": about, "rows": rows}, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
