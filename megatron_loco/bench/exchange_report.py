"""What :mod:`megatron_loco.bench.exchange` makes of its measurements: medians, the machine, a table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from megatron_loco.bench.exchange_arms import GLOO, LOCAL, RING_BF16, RING_FP32
from megatron_loco.bench.exchange_checks import Check, Round
from megatron_loco.bench.links import CONGESTION_CONTROL, MTU, QUEUE, burst_bytes
from megatron_loco.bench.machine import describe_machine

_NOTES = {GLOO: " (moves all-reduce volume)"}


def conditions() -> dict[str, Any]:
    """Describe the machine, the versions and the emulated network."""
    return describe_machine() | {
        "mtu": MTU,
        "congestion_control": CONGESTION_CONTROL,
        "queue": QUEUE,
        "threads_per_rank": 1,
    }


def quietest(rounds: Sequence[Sequence[Round]], foreign_cores: Sequence[float], count: int) -> list[int]:
    """Return the indices, in order, of the ``count`` rounds in which other programs used the least processor time."""
    return sorted(sorted(range(len(rounds)), key=lambda index: foreign_cores[index])[:count])


def summary(
    rounds: Sequence[Sequence[Round]], check: Check, gbit: float, foreign_cores: Sequence[float], kept: Sequence[int]
) -> dict[str, Any]:
    """Put the figures of one rate together.

    Args:
        rounds: By round and rank.
        check: Of any rank: bytes are averages over all.
        gbit: Rate, Gbit/s.
        foreign_cores: By round: cores that other programs used.
        kept: Which rounds count.

    Returns:
        Ready for JSON. A time is the longest of all ranks; ``link_share`` is what was counted at the interface in
        relation to what the rate allows in the median time.
    """
    arms: dict[str, Any] = {}
    for name in check.sent_bytes:
        seconds = [max(rank.seconds[name] for rank in rounds[index]) for index in kept]
        middle = median(seconds)
        arms[name] = {
            "seconds": seconds,
            "median": middle,
            "min": min(seconds),
            "max": max(seconds),
            "sent_bytes": check.sent_bytes[name],
            "layout_bytes": check.wire_bytes[name],
            "num_chunks": check.num_chunks[name],
            "relative_error": check.relative_error.get(name),
            "link_share": check.sent_bytes[name] * 8 / (gbit * 1e9) / middle,
            "cpu_seconds": median(
                sum(rank.cpu_seconds[name] for rank in rounds[index]) / len(rounds[index]) for index in kept
            ),
        }
    for figures in arms.values():
        for ring in (RING_BF16, RING_FP32):
            figures[f"times {ring}"] = arms[ring]["median"] / figures["median"]
    return {
        "gbit": gbit,
        "burst_bytes": burst_bytes(gbit),
        "rounds": len(rounds),
        "kept_rounds": list(kept),
        "foreign_cores": list(foreign_cores),
        "arms": arms,
    }


def print_head(console: Console, result: dict[str, Any]) -> None:
    """Print what was measured, and on what."""
    about = result["machine"]
    console.print(
        f"{about['cpu']}, {about['cores']} cores, kernel {about['kernel']}, torch {about['torch']}; one rank per "
        f"network namespace, {about['threads_per_rank']} thread each; MTU {about['mtu']}, "
        f"{about['congestion_control']}, both directions limited",
        soft_wrap=True,
    )
    config = result["config"]
    console.print(
        f"{result['numel']} elements of {result['dtype']}, {config['bits']} bits, blocks of {config['block_size']}; "
        f"seconds of the slowest rank, median of {result['repeats']} rounds, arms called in turn",
        soft_wrap=True,
    )


def print_rate(console: Console, measured: dict[str, Any]) -> None:
    """Print the table of one number of ranks and one rate."""
    shares = [*measured["stream_shares_before"], *measured["stream_shares_after"]]
    kept = [measured["foreign_cores"][index] for index in measured["kept_rounds"]]
    table = Table(
        Column("reduction", no_wrap=True),
        "seconds",
        "min to max",
        "MB sent",
        "of link",
        "x ring bf16",
        "x ring fp32",
        "CPU s",
        title=f"{measured['ranks']} ranks, {measured['gbit']:g} Gbit/s, backend {measured['backend']}",
        caption=f"Raw TCP streams: {min(shares):.3f} to {max(shares):.3f} of the rate; after a pause a link passes "
        f"{measured['burst_bytes'] / 1e6:.2f} MB at once. Other programs used {min(kept):.2f} to {max(kept):.2f} cores "
        f"in the {len(kept)} of {measured['rounds']} rounds that count.",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for name, arm in measured["arms"].items():
        table.add_row(
            name + _NOTES.get(name, ""),
            f"{arm['median']:.3f}",
            f"{arm['min']:.3f} to {arm['max']:.3f}",
            f"{arm['sent_bytes'] / 1e6:.1f}",
            f"{arm['link_share']:.2f}" if name != LOCAL else "",
            f"{arm[f'times {RING_BF16}']:.2f}" if name != LOCAL else "",
            f"{arm[f'times {RING_FP32}']:.2f}" if name != LOCAL else "",
            f"{arm['cpu_seconds']:.3f}",
        )
    console.print(table)
