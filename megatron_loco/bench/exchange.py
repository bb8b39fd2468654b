"""Time of one gradient reduction where the network limits it: emulated links, LoCo in chunks against exact reductions.

``python -m megatron_loco.bench.exchange [--ranks 2,4] [--rates 1,0.5] [--numel 33554432] [--dtype bf16]``
``python -m megatron_loco.bench.exchange --chunk-bytes 0,262144,524288,2097152 --repeats 10 --json figures.json``

Each rank is a process in a network namespace of its own, with one thread; its link is limited in both directions.
Before and after each measurement raw TCP streams show that the links hold the rate; if not, nothing is reported.

What is compared, call by call in turn, in the same processes:

* Gloo's ``reduce_scatter_tensor``. It is an all-reduce whose result is cut, and moves twice the bytes: no baseline.
* A ring reduce-scatter of point-to-point messages in bf16 and fp32: the baseline.
* LoCo in one chunk: everything is encoded, sent by one all-to-all, and decoded.
* LoCo in chunks, as it is by default, and of the sizes of ``--chunk-bytes``.
* The same chunks by point-to-point messages; in this benchmark only, to see what all-to-alls leave of the link.
* What LoCo computes, without any network.

Before and after that, all results of LoCo must be equal bit for bit, all sums right, and what the interfaces count
within 2 % of what the layout says. All ranks share the cores of one machine with the kernel's network stack: computing
is scarcer here than on any real node, and above about 2 Gbit/s it limits, not the link.

Needs Linux, and root or unprivileged user namespaces; the programs ``ip`` and ``tc`` (package iproute2). Everything
vanishes with the processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_loco.bench.exchange_arms import DTYPES, Plan
from megatron_loco.bench.exchange_checks import Check, Round
from megatron_loco.bench.exchange_ranks import Ranks
from megatron_loco.bench.exchange_report import conditions, print_head, print_rate, quietest, summary
from megatron_loco.bench.links import TOLERANCE, LimitedLinks, is_off
from megatron_loco.bench.namespaces import COUNTERS, enter_private_network
from megatron_loco.collectives.schedule import AUTO_CHUNK_BYTES
from megatron_loco.config import BACKENDS, LoCoConfig

QUIET_CORES = 0.1
"""A round in which other programs used more than that is repeated, at most once on average."""

ATTEMPTS = 3
"""At a raw stream of the right rate, since a busy machine may disturb one."""

REDIRECTED_WIDTH = 120
"""Columns of the tables where they are not printed on a terminal."""


def measure(
    links: LimitedLinks, num_ranks: int, rates: list[float], plan: Plan, repeats: int
) -> Iterator[dict[str, Any]]:
    """Measure one number of ranks at all rates; yields the figures of one rate after the other.

    Raises:
        RuntimeError: a check failed, or the links do not hold their rate.
    """
    with Ranks(num_ranks, plan, links.nodes) as ranks:
        links.limit(None)  # at a limit packets are lost, sent again, and counted twice
        checks: list[Check] = ranks.call("check")
        for gbit in rates:
            links.limit(gbit)
            before = _stream_shares(links, gbit, num_ranks)
            ranks.call("round")  # connections and memory warm up
            rounds: list[list[Round]] = []
            foreign: list[float] = []
            while len(rounds) < 2 * repeats and sum(cores <= QUIET_CORES for cores in foreign) < repeats:
                start, used = time.monotonic(), _user_seconds()
                rounds.append(ranks.call("round"))
                others = _user_seconds() - used - sum(rank.user_seconds for rank in rounds[-1])
                foreign.append(max(0.0, others / (time.monotonic() - start)))
            after = _stream_shares(links, gbit, num_ranks)
            links.limit(None)
            ranks.call("check")  # the stored errors went the same way in every step
            result = summary(rounds, checks[0], gbit, foreign, quietest(rounds, foreign, repeats))
            streams = {"stream_shares_before": before, "stream_shares_after": after}
            yield {"ranks": num_ranks, "backend": checks[0].backend, **streams, **result}


def _stream_shares(links: LimitedLinks, gbit: float, num_ranks: int) -> list[float]:
    for _ in range(ATTEMPTS):
        shares = links.stream_shares(gbit, num_ranks)
        if not is_off(shares):
            return shares
    reached = ", ".join(f"{share:.3f}" for share in shares)
    raise RuntimeError(
        f"raw TCP streams reach {reached} of {gbit:g} Gbit/s, more than {TOLERANCE:.0%} off; the machine is too busy "
        "or too slow for --rates: nothing is reported"
    )


def _user_seconds() -> float:
    # Of all processes of the machine. Not system time: much of it is the network stack at work for the ranks.
    user, nice = Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=3)[1:3]
    return (int(user) + int(nice)) / os.sysconf("SC_CLK_TCK")


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def _integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_loco.bench.exchange",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=_integers, default=[2, 4], help="numbers of ranks, comma-separated")
    parser.add_argument("--rates", type=_numbers, default=[1.0, 0.5], help="Gbit/s, comma-separated")
    parser.add_argument("--numel", type=int, default=2**25, help="elements of the bucket, rounded up to whole shards")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="of the gradients")
    parser.add_argument("--chunk-bytes", type=_integers, default=[0], help="sizes to compare; 0 is the default size")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count")
    parser.add_argument("--bits", type=int, choices=(1, 2, 4, 8), default=4)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    parser.add_argument("--json", metavar="PATH", help="write the figures there as well")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are ended
    console = Console(width=None if sys.stdout.isatty() else REDIRECTED_WIDTH)
    try:
        plan = _plan(args)
        if not COUNTERS.exists():
            raise RuntimeError(f"{COUNTERS} does not exist; this measurement needs Linux")
        if not enter_private_network():
            raise RuntimeError("emulated links need root, or unprivileged user namespaces")
        links = LimitedLinks(max(args.ranks))
        links.limit(args.rates[0])  # now, so that a missing program shows before anything is computed
        result = {"machine": conditions(), **dataclasses.asdict(plan), "repeats": args.repeats, "measurements": []}
        print_head(console, result)
        for num_ranks in args.ranks:
            for measured in measure(links, num_ranks, args.rates, plan, args.repeats):
                print_rate(console, measured)
                result["measurements"].append(measured)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1), encoding="utf-8")
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    if min(args.ranks) < 2:
        raise ValueError(f"--ranks must be at least 2, got {min(args.ranks)}: one rank sends nothing")
    if not min(args.rates) > 0:
        raise ValueError(f"--rates must be positive, got {min(args.rates)}")
    if args.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {args.repeats}")
    if min(args.chunk_bytes) < 0:
        raise ValueError(f"--chunk-bytes must not be negative, got {min(args.chunk_bytes)}")
    unit = 128
    for num_ranks in args.ranks:
        unit *= num_ranks
    if args.numel < unit:
        raise ValueError(f"--numel must be at least {unit} for these --ranks, got {args.numel}")
    sizes = dict.fromkeys(size if size != AUTO_CHUNK_BYTES["cpu"] else 0 for size in args.chunk_bytes)
    config = LoCoConfig(bits=args.bits, block_size=args.block_size, backend=args.backend)
    return Plan(-(-args.numel // unit) * unit, args.dtype, tuple(sizes), config)


if __name__ == "__main__":
    sys.exit(main())
