"""The reductions that :mod:`megatron_loco.bench.exchange` compares, as they run on one rank."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loco.bench.exchange_checks import Check, Round, check_equal, check_sent
from megatron_loco.bench.namespaces import transmitted_bytes
from megatron_loco.bench.ring import RingReduceScatter
from megatron_loco.bench.rotated import rotated_reduce_scatter
from megatron_loco.bench.wire import layer_spans
from megatron_loco.collectives.reduce_scatter import reduce_scatter
from megatron_loco.collectives.schedule import chunk_bytes
from megatron_loco.collectives.scratch import ScratchPool
from megatron_loco.collectives.state import BucketState
from megatron_loco.config import LoCoConfig
from megatron_loco.core.exchange import plan_exchange
from megatron_loco.core.wire import ParamSpan

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

GLOO, RING_BF16, RING_FP32 = "Gloo", "ring bf16", "ring fp32"
ONE_CHUNK, CHUNKS = "LoCo, one chunk", "LoCo, chunks of"
ROTATED, LOCAL = "LoCo, point-to-point,", "LoCo without network"
"""Names of arms; the size of the chunks follows."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Plan:
    """What to measure; equal on all ranks.

    Attributes:
        numel: Elements of the bucket.
        dtype: Of the gradients, a key of :data:`DTYPES`.
        chunk_bytes: Sizes of chunks to compare, 0 for the size that is chosen without ``--loco-chunk-bytes``.
        config: Settings of LoCo; its ``chunk_bytes`` is not used.
    """

    numel: int
    dtype: str
    chunk_bytes: tuple[int, ...]
    config: LoCoConfig


@dataclass
class Arm:
    """One reduction.

    Attributes:
        reduce: Reduces the bucket into ``output``.
        output: Where the shard goes.
        wire_bytes: What it should send per rank, averaged over the ranks; ``None`` if that is Gloo's affair.
        tolerance: Largest relative error of its sum, and why.
        num_chunks: All-to-alls per reduction.
        is_loco: Whether its result must be that of all others of which this is true, bit for bit.
    """

    reduce: Callable[[], None]
    output: Tensor
    wire_bytes: float | None
    tolerance: float
    num_chunks: int = 1
    is_loco: bool = False


class Bench:
    """All arms on one rank.

    Args:
        plan: What to measure.
        group: Gloo ranks.
    """

    def __init__(self, plan: Plan, group: dist.ProcessGroup) -> None:
        self._group = group
        dtype = DTYPES[plan.dtype]
        generator = torch.Generator().manual_seed(group.rank())
        grad = torch.randn(plan.numel, generator=generator).to(dtype)
        output = torch.empty(plan.numel // group.size(), dtype=dtype)
        rounded = 1e-5 if dtype == torch.float32 else 0.02  # bf16: 2^-9 per addition, and a sum of few

        def gloo() -> None:
            dist.reduce_scatter_tensor(output, grad, group=group)

        self.arms: dict[str, Arm] = {GLOO: Arm(gloo, output, None, rounded)}
        for name, ring_dtype in ((RING_BF16, torch.bfloat16), (RING_FP32, torch.float32)):
            self.arms[name] = self._ring_arm(grad.to(ring_dtype), rounded if ring_dtype == dtype else 0.02)
        self._backend = ""
        scratch = ScratchPool(_CPU)
        whole = max(plan.numel * 8, 1)  # more than any payload
        for size in (whole, *plan.chunk_bytes):
            state = self._state(plan, size, scratch)
            label = _label(chunk_bytes(state.config, _CPU)) + ("" if size else " (auto)")
            self._add_loco(ONE_CHUNK if size == whole else f"{CHUNKS} {label}", grad, output, state)
        state = self._state(plan, plan.chunk_bytes[0], scratch)
        name = f"{ROTATED} {_label(chunk_bytes(state.config, _CPU))}"
        self._add_loco(name, grad, output, state, point_to_point=True)
        self._add_local(grad, output, self._state(plan, whole, scratch))

    def check(self, interface: str | None) -> Check:
        """Call every arm once; compare the sums and the bytes.

        Args:
            interface: Whose transmitted bytes to count, of this process's namespace; ``None`` counts nothing.

        Raises:
            RuntimeError: a sum is wrong, results of LoCo differ, or it does not send what its layout says.
        """
        sent: dict[str, float] = {}
        results: dict[str, Tensor] = {}
        for name, arm in self.arms.items():
            arm.output.fill_(float("nan"))  # so that what is not written shows
            before = transmitted_bytes(interface) if interface else 0
            dist.barrier(group=self._group)
            arm.reduce()
            dist.barrier(group=self._group)
            after = transmitted_bytes(interface) if interface else 0
            total = torch.tensor(float(after - before), dtype=torch.float64)
            dist.all_reduce(total, group=self._group)
            sent[name] = total.item() / self._group.size()
            results[name] = arm.output.clone()
        check_equal({name: results[name] for name, arm in self.arms.items() if arm.is_loco})
        exact = results[RING_FP32]
        errors = {
            name: ((result.float() - exact).norm() / exact.norm()).item()
            for name, result in results.items()
            if name not in (RING_FP32, LOCAL)
        }
        for name, error in errors.items():
            if not error < self.arms[name].tolerance:
                raise RuntimeError(f"{name}: relative error {error:.3g} of the sum; nothing is reported")
        wire_bytes = {name: arm.wire_bytes for name, arm in self.arms.items()}
        if interface:
            check_sent(sent, wire_bytes)
        num_chunks = {name: arm.num_chunks for name, arm in self.arms.items()}
        return Check(sent, wire_bytes, num_chunks, errors, self._backend)

    def round(self) -> Round:
        """Call every arm once and time it, each after a barrier."""
        result = Round()
        user = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        for name, arm in self.arms.items():
            dist.barrier(group=self._group)
            cpu, start = time.process_time(), time.perf_counter()
            arm.reduce()
            result.seconds[name] = time.perf_counter() - start
            result.cpu_seconds[name] = time.process_time() - cpu
        dist.barrier(group=self._group)
        result.user_seconds = resource.getrusage(resource.RUSAGE_SELF).ru_utime - user
        return result

    def _ring_arm(self, grad: Tensor, tolerance: float) -> Arm:
        output = torch.empty(grad.numel() // self._group.size(), dtype=grad.dtype)
        ring = RingReduceScatter(grad.numel(), grad.dtype, self._group)
        share = (self._group.size() - 1) / self._group.size()
        return Arm(lambda: ring(output, grad), output, grad.numel() * grad.element_size() * share, tolerance)

    def _state(self, plan: Plan, size: int, scratch: ScratchPool) -> BucketState:
        # A state for each arm: the error goes its own way, and must go the same one.
        settings = {name: getattr(plan.config, name) for name in ("bits", "block_size", "backend")}
        config = LoCoConfig(**settings, warmup_steps=0, chunk_bytes=size)
        exchange = plan_exchange(
            plan.numel,
            (0,) * self._group.size(),
            model_spans(plan.numel),
            two_level=False,
            bits=config.bits,
            block_size=config.block_size,
            exact_itemsize=DTYPES[plan.dtype].itemsize,
            chunk_bytes=chunk_bytes(config, _CPU),
        )
        return BucketState("bucket", exchange.layouts[0], config, _CPU, scratch, exchange)

    def _add_loco(
        self, name: str, grad: Tensor, output: Tensor, state: BucketState, *, point_to_point: bool = False
    ) -> None:
        def all_to_all() -> None:
            reduce_scatter(output, grad, state, op=dist.ReduceOp.SUM, group=self._group)

        def rotated() -> None:
            rotated_reduce_scatter(output, grad, state, group=self._group)

        self._backend = state.backend.name
        # Gaussian blocks of 256 reach about 2.9 sigma, so a 4-bit step is 0.41 sigma and its error 0.12.
        tolerance = {8: 0.03, 4: 0.3}.get(state.config.bits, 2.0)
        reduce = rotated if point_to_point else all_to_all
        self.arms[name] = Arm(
            reduce, output, state.exchange.cost.sent_bytes, tolerance, len(state.chunks), is_loco=True
        )

    def _add_local(self, grad: Tensor, output: Tensor, state: BucketState) -> None:
        # What one rank computes in a reduction, while the others do the same: the time that no network can beat.
        rank, layout = self._group.rank(), state.layout
        send = torch.zeros(layout.send_bytes, dtype=torch.uint8)
        recv = torch.zeros(layout.recv_bytes(rank), dtype=torch.uint8)

        def local() -> None:
            state.encode(grad, layout, send)
            state.backend.decode_sum(recv, layout, rank, output, divisor=1)

        local()
        start = layout.send_offsets[rank]
        recv.copy_(send[start : start + layout.send_splits[rank]].repeat(layout.world_size))
        self.arms[LOCAL] = Arm(local, output, 0.0, float("inf"))


def model_spans(numel: int) -> list[ParamSpan]:
    """Fill a bucket of ``numel`` elements with the parameters of as many LLaMA layers as it takes; the last one is
    cut."""
    layer, stride = layer_spans()
    shifted = (
        ParamSpan(span.start + start, min(span.stop + start, numel), span.exact)
        for start in range(0, numel, stride)
        for span in layer
    )
    return [span for span in shifted if span.start < span.stop]


def _label(num_bytes: int) -> str:
    return f"{num_bytes // 2**10} KiB" if num_bytes % 2**10 == 0 else f"{num_bytes} B"
