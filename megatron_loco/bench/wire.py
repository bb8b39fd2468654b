"""Bytes on the wire of one gradient reduction, counted by the kernel at the network interface, against the formula.

``python -m megatron_loco.bench.wire [--ranks 2] [--bits 4] [--block-size 256] [--json]``
``python -m megatron_loco.bench.wire --ranks 8 --ranks-per-node 4 [--topology auto]``

Ranks are processes of this machine that reduce one bucket shaped like a LLaMA layer over Gloo; all that they send
crosses the loopback interface, whose byte counter is read before and after. They run in a network namespace of their
own, so that nobody else's traffic is counted; where that is not allowed, the output says so. The formula is, per
element and rank, ``(bits + 32 / block_size) * quantised share + 8 * itemsize * exact share``, times ``(W - 1) / W``.

With ``--ranks-per-node``, each node is a network namespace, and what is counted is what leaves the nodes through the
interfaces between them. Where the topology is two-level, the flat exchange is measured beside it in the same run.

The counter also sees packet headers and acknowledgements (0.1 to 1 %). Each result is compared with an exact reduction
first. Linux only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from megatron_loco.bench.namespaces import (
    COUNTERS,
    LOOPBACK,
    NODE_INTERFACE,
    EmulatedNodes,
    enter_private_network,
    transmitted_bytes,
)
from megatron_loco.collectives.placement import FLAT, TWO_LEVEL, Topology, choose_topology
from megatron_loco.collectives.reduce_scatter import reduce_scatter
from megatron_loco.collectives.schedule import chunk_bytes
from megatron_loco.collectives.scratch import ScratchPool
from megatron_loco.collectives.state import BucketState
from megatron_loco.collectives.two_level import new_node_groups
from megatron_loco.config import TOPOLOGIES, LoCoConfig
from megatron_loco.core.exchange import plan_exchange
from megatron_loco.core.wire import ParamSpan

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


def measure(rank: int, topology: Topology, folder: str, config: LoCoConfig) -> None:
    """Body of one rank; rank 0 writes ``result.json`` into ``folder``. Bytes are per rank and reduction; on several
    nodes, only what goes to other nodes.

    Raises:
        RuntimeError: a compressed sum is not close to the exact one; nothing was measured.
    """
    world_size = len(topology.nodes)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    group = dist.group.WORLD
    assert group is not None
    node_groups = new_node_groups(topology, group) if topology.kind == TWO_LEVEL else None
    spans, numel = layer_spans()
    numel = -(-numel // (128 * world_size)) * 128 * world_size
    device, dtype = torch.device("cpu"), torch.float32
    grad = torch.zeros(numel)
    for index, span in enumerate(spans):
        generator = torch.Generator().manual_seed(1000 * rank + index)
        grad[span.start : span.stop] = torch.randn(span.stop - span.start, generator=generator)
    output = torch.empty(numel // world_size)

    def count(collective: Callable[[], None]) -> float:
        return _interface_bytes(collective, topology, group) / world_size

    def stock() -> None:
        dist.reduce_scatter_tensor(output, grad, group=group)

    stock()
    exact = output.clone()
    schemes: dict[str, dict[str, float]] = {}
    for kind in dict.fromkeys((FLAT, topology.kind)):
        exchange = plan_exchange(
            numel,
            topology.nodes,
            spans,
            two_level=kind == TWO_LEVEL,
            bits=config.bits,
            block_size=config.block_size,
            exact_itemsize=dtype.itemsize,
            chunk_bytes=chunk_bytes(config, device),
        )
        state = BucketState("layer", exchange.layout(rank), config, device, ScratchPool(device), exchange)

        def loco(state: BucketState = state) -> None:
            reduce_scatter(output, grad, state, op=dist.ReduceOp.SUM, group=group, node_groups=node_groups)

        loco()
        error = ((output - exact).norm() / exact.norm()).item()
        # Gaussian blocks of 256 reach about 2.9 sigma, so a 4-bit step is 0.41 sigma and its error 0.41 / sqrt(12) =
        # 0.12; a wrong shard or scale gives 1 and more.
        if not error < 0.3:
            raise RuntimeError(f"rank {rank}: {kind} is wrong, relative error {error:.3f}; nothing was measured")
        schemes[kind] = {
            "relative_error": error,
            "formula_bytes": exchange.cost.internode_bytes if topology.num_nodes > 1 else exchange.cost.sent_bytes,
            "counted_bytes": count(loco),
        }
    ring = exchange.ring_cost(dtype.itemsize)
    result = {
        "numel": numel,
        "schemes": schemes,
        "ring_fp32_bytes": ring.internode_bytes if topology.num_nodes > 1 else ring.sent_bytes,
        "stock_gloo_fp32_bytes": count(stock),
    }
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _interface_bytes(collective: Callable[[], None], topology: Topology, group: dist.ProcessGroup) -> float:
    # Summed over the nodes; the first rank of each reads its node's counter.
    interface = NODE_INTERFACE if topology.num_nodes > 1 else LOOPBACK
    is_first = topology.nodes.index(topology.nodes[group.rank()]) == group.rank()
    collective()
    dist.barrier(group=group)
    before = transmitted_bytes(interface)
    dist.barrier(group=group)
    for _ in range(REPEATS):
        collective()
    dist.barrier(group=group)
    after = transmitted_bytes(interface)
    total = torch.tensor(float(after - before if is_first else 0), dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return total.item() / REPEATS


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m megatron_loco.bench.wire", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, help="emulate nodes of that many ranks; default: all on one")
    parser.add_argument("--topology", choices=TOPOLOGIES, default="auto")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args(argv)
    if not COUNTERS.exists():
        print(f"error: {COUNTERS} does not exist; this measurement needs Linux", file=sys.stderr)
        return 2
    size = args.ranks if args.ranks_per_node is None else args.ranks_per_node
    try:
        if args.ranks < 2:
            raise ValueError(f"--ranks must be at least 2, got {args.ranks}: one rank sends nothing")
        if size < 1:
            raise ValueError(f"--ranks-per-node must be at least 1, got {size}")
        topology = choose_topology([rank // size for rank in range(args.ranks)], args.topology)
        config = LoCoConfig(bits=args.bits, block_size=args.block_size, warmup_steps=0)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    private = enter_private_network()
    nodes = None
    if topology.num_nodes > 1:
        try:
            if not private:
                raise RuntimeError("emulated nodes need root, or unprivileged user namespaces")
            nodes = EmulatedNodes(topology.num_nodes)
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        os.environ["GLOO_SOCKET_IFNAME"] = NODE_INTERFACE
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=measure, args=(r, topology, folder, config)) for r in range(args.ranks)]
        for rank, process in enumerate(ranks):
            with nodes.inside(topology.nodes[rank]) if nodes else nullcontext():
                process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            return 1
        result = json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))
    result |= {"private_network": private, "ranks": args.ranks, "bits": args.bits, "block_size": args.block_size}
    result |= {"nodes": topology.num_nodes, "topology": topology.kind}
    if args.json:
        print(json.dumps(result))
    elif nodes:
        _print_nodes(result)
    else:
        _print_table(result)
    return 0


def _print_table(result: dict[str, Any]) -> None:
    console = Console()
    console.print(
        f"torch {torch.__version__}, {platform.machine()}, {result['ranks']} Gloo ranks, {result['numel']} elements"
    )
    leaving = result["numel"] * (result["ranks"] - 1) / result["ranks"]
    table = Table("per rank and reduction", "bytes", "bits per element that leaves the rank")
    flat = result["schemes"][FLAT]
    for label, num_bytes in (
        ("formula", flat["formula_bytes"]),
        ("counted", flat["counted_bytes"]),
        ("ring fp32", result["ring_fp32_bytes"]),
        ("stock gloo fp32", result["stock_gloo_fp32_bytes"]),
    ):
        table.add_row(label, f"{num_bytes:,.0f}", f"{8 * num_bytes / leaving:.3f}")
    console.print(table)
    if not result["private_network"]:
        console.print("no private network namespace allowed here: other local traffic was counted too")
    console.print(
        f"counted / formula: {flat['counted_bytes'] / flat['formula_bytes']:.4f}; "
        f"relative error of one compressed sum: {flat['relative_error']:.3f}"
    )


def _print_nodes(result: dict[str, Any]) -> None:
    console = Console()
    per_node = result["ranks"] / result["nodes"]
    console.print(
        f"torch {torch.__version__}, {platform.machine()}, {result['ranks']} Gloo ranks on {result['nodes']} emulated "
        f"nodes, {result['numel']} elements, {result['bits']} bits; bytes that leave a node per reduction",
        soft_wrap=True,
    )
    table = Table("reduction", "formula", "counted", "counted / formula", "against ring in bf16")
    ring_bf16 = result["ring_fp32_bytes"] / 2
    for kind, scheme in result["schemes"].items():
        formula, counted = scheme["formula_bytes"], scheme["counted_bytes"]
        table.add_row(
            kind,
            f"{formula * per_node:,.0f}",
            f"{counted * per_node:,.0f}",
            f"{counted / formula:.4f}",
            f"{counted / ring_bf16:.3f}",
        )
    table.add_row("ring in bf16", f"{ring_bf16 * per_node:,.0f}", "", "", "1")
    stock = result["stock_gloo_fp32_bytes"]
    table.add_row("stock Gloo, fp32", "", f"{stock * per_node:,.0f}", "", f"{stock / ring_bf16:.3f}")
    console.print(table)
    if TWO_LEVEL in result["schemes"]:
        flat, two_level = result["schemes"][FLAT], result["schemes"][TWO_LEVEL]
        console.print(
            f"two-level sends {flat['counted_bytes'] / two_level['counted_bytes']:.3f} times less between nodes than "
            f"flat; relative errors {two_level['relative_error']:.3f} and {flat['relative_error']:.3f}",
            soft_wrap=True,
        )


if __name__ == "__main__":
    sys.exit(main())
