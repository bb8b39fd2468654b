"""LoCo against stock Megatron on every way to spread data parallelism over ranks: deviation and bytes.

``python -m megatron_loco.bench.topology [--ranks 2 3 4 8] [--json]``

On CPU ranks over Gloo, Megatron's real ``DistributedDataParallel`` reduces prescribed gradients, without and with
overlap (``off / on`` in the table, where they differ):

* *whole numbers*: largest difference of the identity codec (32 bits) from stock. The gradients are whole
  numbers whose sum is exact in any order, so it must be 0.
* *random*: the same for random gradients. The order of summation differs, and with it the rounding: in ulps
  (of the buffer's dtype) of the sum of magnitudes. Either order is off by at most ``ranks`` half ulps of that (``ranks
  - 1`` additions, one scaling), so at most ``ranks`` ulps are expected.
* *bytes/element*: what a rank sends in 4 bits, per element that leaves it, scales and exact parameters included. Taken
  from LoCo's counters, which must agree with the bytes that were handed to ``all_to_all_single``.
* *exact beside*: what it sends exactly per such element: the hop inside the node (two-level), the all-reduce across
  optimizer instances.

Takes about two minutes on two cores. Exit status 1 if one of the three conditions does not hold.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron_loco import LoCoConfig, patch
from megatron_loco.bench.prescribed import Case, buckets, parallel_megatron, reduce_case, train_step, wrap
from megatron_loco.collectives.state import Traffic

SHAPES = ((256, 128), (256,), (96, 129), (7,), (128, 256), (33,))
RANKS = (2, 3, 4, 8)
NUM_STEPS = 2
"""With overlap Megatron reduces at the end of the first step, and from the second on within the backward pass."""


@dataclass(frozen=True)
class Topology:
    """A row of the table: how a case is set up, and the numbers of ranks that it is possible for."""

    name: str
    case: Case
    multiple_of: int = 1
    at_least: int = 2
    settings: tuple[tuple[str, Any], ...] = ()

    def fits(self, num_ranks: int) -> bool:
        """Whether it can be set up on that many ranks."""
        return num_ranks >= self.at_least and num_ranks % self.multiple_of == 0

    def loco(self, bits: int) -> LoCoConfig:
        """Settings that compress from the first step on, buckets of any size."""
        return LoCoConfig(bits=bits, warmup_steps=0, min_bucket_numel=0, **dict(self.settings))


TOPOLOGIES = (
    Topology("data parallel", Case(shapes=SHAPES)),
    Topology("bf16 buffers", Case(shapes=SHAPES, grad_dtype=torch.bfloat16)),
    Topology("average in collective", Case(shapes=SHAPES, average=True)),
    Topology("several buckets", Case(shapes=SHAPES, bucket_size=33000)),
    Topology("expert parallel 2", Case(shapes=SHAPES, expert_parallel=2), multiple_of=2),
    Topology("2 optimizer instances", Case(shapes=SHAPES, num_instances=2), multiple_of=2, at_least=4),
    Topology("context parallel 2", Case(shapes=SHAPES, context_parallel=2), multiple_of=2),
    Topology(
        "two-level, 2 ranks per node",
        Case(shapes=SHAPES),
        multiple_of=2,
        at_least=4,
        settings=(("topology", "two-level"), ("ranks_per_node", 2)),
    ),
)


def measure(rank: int, world_size: int, folder: str) -> None:
    """Body of one rank; rank 0 writes the rows of this number of ranks to ``<world_size>.json`` in ``folder``."""
    logging.disable(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - Megatron reports every bucket
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world_size}", rank=rank, world_size=world_size)
    rows = []
    for topology in TOPOLOGIES:
        if topology.fits(world_size):
            with ExitStack() as stack:
                case = topology.case
                parallel_megatron(
                    stack,
                    case.expert_parallel,
                    context_parallel=case.context_parallel,
                    num_instances=case.num_instances,
                )
                rows += [_row(topology, overlap, rank, world_size) for overlap in (False, True)]
    if rank == 0:
        Path(folder, f"{world_size}.json").write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _row(topology: Topology, overlap: bool, rank: int, world_size: int) -> dict[str, Any]:
    case = replace(topology.case, overlap=overlap)
    whole = max(d.max().item() for d in _deviations(replace(case, multiple_of=world_size), topology, rank))
    magnitudes = reduce_case(replace(case, magnitudes=True), rank, None, NUM_STEPS)
    ulp = torch.finfo(case.grad_dtype).eps
    ulps = max(
        # Padding has neither gradients nor deviations.
        (deviation / (ulp * magnitude.double()).clamp_min(1e-30)).max().item()
        for deviation, magnitude in zip(_deviations(case, topology, rank), chain(*magnitudes), strict=True)
    )
    largest = torch.tensor([whole, ulps], dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    totals = torch.tensor(_traffic(case, topology, rank), dtype=torch.float64)
    dist.all_reduce(totals)
    sent, beside, elements, handed = totals.tolist()
    return {
        "topology": topology.name,
        "ranks": world_size,
        "overlap": overlap,
        "deviation_whole": largest[0].item(),
        "deviation_random_ulps": largest[1].item(),
        "bytes_per_element": sent / elements,
        "exact_bytes_beside": beside / elements,
        "counters_are_right": math.isclose(sent, handed, rel_tol=1e-9),
    }


def _deviations(case: Case, topology: Topology, rank: int) -> list[Tensor]:
    # What the identity codec adds to stock: magnitudes per shard, all steps.
    stock = reduce_case(case, rank, None, NUM_STEPS)
    identity = reduce_case(case, rank, topology.loco(32), NUM_STEPS)
    return [(a.double() - b.double()).abs() for a, b in zip(chain(*identity), chain(*stock), strict=True)]


def _traffic(case: Case, topology: Topology, rank: int) -> tuple[float, float, float, float]:
    # Of this rank, all steps: bytes in few bits and exact ones as counted, elements, and bytes handed to all_to_all.
    handed = 0
    original = dist.all_to_all_single

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal handed
        splits = kwargs["input_split_sizes"]
        handed += sum(splits) - splits[kwargs["group"].rank()]
        return original(*args, **kwargs)

    with patch(topology.loco(4)):
        ddp = wrap(case)
        dist.all_to_all_single = counting
        try:
            for step in range(NUM_STEPS):
                train_step(ddp, case, rank, step)
        finally:
            dist.all_to_all_single = original
    groups = {id(group): group for group, _ in buckets(ddp)}.values()
    states = [state.traffic for group in groups for _, state in group.loco_states]
    stock = Traffic()
    for group in groups:
        for exchange in group.loco_stock:
            exchange.count(stock)
    inner = sum(traffic.inner_bytes for traffic in states)
    return (
        sum(traffic.sent_bytes for traffic in states) - inner,
        inner + NUM_STEPS * stock.sent_bytes,
        sum(traffic.elements for traffic in states),
        handed,
    )


def run(all_ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Measure on each of these numbers of ranks.

    Raises:
        RuntimeError: a rank failed; its traceback is on stderr.
    """
    # A GPU would be found by Megatron; the ranks are CPU ranks.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Megatron warns of each missing GPU package.
    os.environ["PYTHONWARNINGS"] = "ignore"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "megatron.training.training"])
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks in all_ranks:
            ranks = [context.Process(target=measure, args=(rank, num_ranks, folder)) for rank in range(num_ranks)]
            for process in ranks:
                process.start()
            _join(ranks)
            rows += json.loads(Path(folder, f"{num_ranks}.json").read_text(encoding="utf-8"))
    return rows


def _join(ranks: Sequence[Any]) -> None:
    running = {process.sentinel: process for process in ranks}
    while running:
        for sentinel in wait(list(running)):
            ended = running.pop(sentinel)
            ended.join()
            if ended.exitcode:
                for process in running.values():
                    process.kill()  # they would wait for it for half an hour
                raise RuntimeError(f"a rank of {len(ranks)} failed")


def is_right(row: dict[str, Any]) -> bool:
    """Whether a row is as it must be."""
    exact = row["deviation_whole"] == 0.0
    return bool(exact and row["deviation_random_ulps"] <= row["ranks"] and row["counters_are_right"])


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m megatron_loco.bench.topology", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args(argv)
    if min(args.ranks) < 2:
        print(f"error: --ranks must be at least 2, got {min(args.ranks)}: one rank reduces nothing", file=sys.stderr)
        return 2
    machine = {
        "torch": torch.__version__,
        "megatron-core": version("megatron-core"),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    try:
        rows = run(args.ranks)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps({**machine, "rows": rows})) if args.json else _print_table(machine, rows)
    return 0 if all(map(is_right, rows)) else 1


def _print_table(machine: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(
        f"torch {machine['torch']}, megatron-core {machine['megatron-core']}, {machine['machine']}, "
        f"{machine['cores']} cores, Gloo ranks; where overlap makes a difference: off / on"
    )
    table = Table("topology", "ranks", "whole numbers", "random (ulps)", "bytes/element", "exact beside")

    def both(off: dict[str, Any], on: dict[str, Any], name: str, form: str) -> str:
        values = [f"{row[name]:{form}}" for row in (off, on)]
        return values[0] if values[0] == values[1] else " / ".join(values)

    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    for off, on in sorted(pairs, key=lambda pair: [t.name for t in TOPOLOGIES].index(pair[0]["topology"])):
        table.add_row(
            off["topology"],
            str(off["ranks"]),
            both(off, on, "deviation_whole", "g"),
            both(off, on, "deviation_random_ulps", ".2f"),
            both(off, on, "bytes_per_element", ".4f"),
            both(off, on, "exact_bytes_beside", ".4f"),
        )
    console.print(table)
    wrong = [f"{row['topology']} on {row['ranks']} ranks" for row in rows if not is_right(row)]
    console.print(
        f"not as expected: {', '.join(wrong)}" if wrong else "all as expected; counters equal bytes handed over"
    )


if __name__ == "__main__":
    sys.exit(main())
