"""How the answer of ``megatron-loco plan`` is shown: as text with a table, or as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from megatron_loco.launch import plan_cost

if TYPE_CHECKING:
    from megatron_loco.launch.plan import Plan

WIDTH = 120


def show(plan: Plan, lines: Sequence[str], options: argparse.Namespace) -> None:
    """Print the whole answer: what was asked, the table, the assumptions, the verdict."""
    setup, cluster, step = plan.setup, plan.cluster, plan.step
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, soft_wrap=not sys.stdout.isatty())
    layout, model, say = setup.layout, setup.model, console.print
    links = f"{options.network_links} x " if options.network_links > 1 else ""
    where = f"{cluster.nodes} x {cluster.gpus_per_node} {options.gpu.upper()}, {links}{options.network_gbit:g} Gbit/s"
    active = f"; a token passes {model.active:,.0f}" if model.active != model.total else ""
    say(f"plan: {setup.name} on {where} per node. A model, not a measurement.")
    say(f"  parameters: {model.total:,} ({model.source}){active}")
    data_parallel = layout.data_parallel(cluster.world_size)
    sizes = f"DP {data_parallel}, TP {layout.tensor}, PP {layout.pipeline}, CP {layout.context}, EP {layout.expert}"
    tokens = f"{setup.tokens_per_gpu:,.0f} tokens per GPU and step in {setup.num_micro_batches} micro-batch(es)"
    say(f"  layout: {sizes}; {tokens}")
    for topology in plan.topologies:
        say(f"  {topology}")
    say(_table(plan))
    default = (
        f"{plan_cost.MODEL_FLOPS_UTILISATION:.0%} of the peak, as LLaMA-2 7B had on A100 by its published GPU hours"
    )
    bubble = f", pipeline bubble {setup.bubble:.0%} of it included" if setup.bubble else ""
    for line in (
        f"assumed: {cluster.flops / 1e12:.0f} TFLOP/s attained per GPU: {'--tflops' if options.tflops else default}",
        f"network at {options.network_efficiency:.0%} of its rate: {cluster.network_bytes / 1e9:.1f} GB/s per node; "
        f"NVLink at {options.nvlink_efficiency:.0%}: {cluster.nvlink_bytes / 1e9:.0f} GB/s per GPU",
        f"encode and decode at {options.kernel_efficiency:.0%} of memory: {cluster.kernel_bytes / 1e12:.2f} TB/s",
        f"computing {_ms(step.compute_s)} ms{bubble}",
        f"all-gather of bf16 parameters {_ms(step.gather_s)} ms, in all rows",
        "overlapped: the reduction behind 2/3, the all-gather behind 1/3 of the computing of one micro-batch",
        "encode and decode in full, and the hop inside the node before that between nodes: neither is hidden",
        "not counted: latency, stragglers, other traffic, tensor, expert and pipeline parallel communication, and that "
        "LoCo's first steps are exact",
    ):
        say(line if line.startswith("assumed") else f"  {line}")
    error, scratch = (_number(size / 1e6) for size in (plan.chosen.error_bytes, plan.chosen.scratch_bytes))
    say(f"memory that LoCo adds per GPU ({plan.chosen.name}): error state {error} MB, scratch {scratch} MB")
    for line in (*(f"note: {note}" for note in setup.notes), *lines):
        say(line)


def _table(plan: Plan) -> Table:
    unit, scale = ("GB", 1e9) if plan.reductions[0].sent_bytes >= 1e9 else ("MB", 1e6)
    links = plan.cluster.network_links
    overlaps = plan.setup.overlap_reduce or plan.setup.overlap_gather
    table = Table(
        title=f"per step; LoCo at {plan.setup.loco.bits} bits from {plan.setup.grad_bytes * 8}-bit gradient buffers",
        title_justify="left",
        caption="* what training would take; x: speed-up of the step over stock with such gradients",
        caption_justify="left",
    )
    table.add_column("gradients", no_wrap=True)
    columns = [f"rank\nsends {unit}", f"node\nsends {unit}", *([f"per link\n{unit}"] if links > 1 else [])]
    columns += ["reduce\nms", "kernels\nms", "step ms" + ("\nbare" if overlaps else ""), "x\nfp32", "x\nbf16"]
    for column in columns + (["step ms\nas set", "x\nfp32", "x\nbf16"] if overlaps else []):
        table.add_column(column, justify="right", no_wrap=True)
    for reduction in plan.reductions:
        sizes = [reduction.sent_bytes, reduction.internode_bytes]
        sizes += [reduction.internode_bytes / links] if links > 1 else []
        cells = [reduction.name + (" *" if reduction.name == plan.chosen.name else "")]
        cells += [*(_number(size / scale) for size in sizes), _ms(reduction.seconds), _ms(reduction.kernel_s)]
        for step in (plan.plain_step, plan.step) if overlaps else (plan.plain_step,):
            cells += [_ms(step.seconds(reduction)), *(f"{ratio:.2f}" for ratio in plan.speed_ups(reduction, step))]
        table.add_row(*cells)
    return table


def _ms(seconds: float) -> str:
    return _number(seconds * 1e3)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or not value else f"{value:.3g}"


def as_json(plan: Plan, lines: Sequence[str]) -> dict[str, Any]:
    """Return the figures in bytes and seconds, ready for JSON."""
    setup = plan.setup
    return {
        "model": {"name": setup.name, "parameters": setup.model.total, "active_parameters": setup.model.active},
        "layout": {"data": setup.layout.data_parallel(plan.cluster.world_size), **dataclasses.asdict(setup.layout)},
        "tokens_per_gpu": setup.tokens_per_gpu,
        "cluster": dataclasses.asdict(plan.cluster),
        "groups": [{"name": g.name, "elements": g.numel, "nodes": g.nodes} for g in plan.groups],
        "topologies": plan.topologies,
        "compute_s": plan.step.compute_s,
        "gather_s": plan.step.gather_s,
        "reductions": [
            {
                **dataclasses.asdict(reduction),
                "seconds": reduction.seconds,
                "step_s": plan.plain_step.seconds(reduction),
                "step_as_set_s": plan.step.seconds(reduction),
                "chosen": reduction.name == plan.chosen.name,
            }
            for reduction in plan.reductions
        ],
        "notes": setup.notes,
        "verdict": list(lines),
        "is_measured": False,
    }
