"""``megatron-loco plan``: what LoCo would save on a cluster, before any GPU hour is spent. A model, not a measurement.

Bytes follow from shapes and placement and are those of training. Times are those bytes over rates that are assumed and
printed. Needs no GPU and starts no process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_loco.launch import plan_cost, plan_report, plan_setup
from megatron_loco.launch.plan_cost import GPUS, Cluster, Group, Reduction, Step
from megatron_loco.launch.plan_setup import Setup
from megatron_loco.launch.plan_verdict import verdict

GPUS_PER_NODE = 8

EXAMPLES = """examples:
  megatron-loco plan my_model.yaml --gpu a100 --nodes 8 --network-gbit 200
  megatron-loco plan my_model.yaml tensor-model-parallel-size=8 global-batch-size=256 --gpu h100 --nodes 16 \\
      --network-gbit 400 --network-links 8
  megatron-loco plan --params 6.7e9 --tokens-per-gpu 4096 --gpu a100 --nodes 8 --network-gbit 200 loco.bits=8

exit status: 0 an answer, whatever it is; 2 a mistake in the configuration or the flags
"""


@dataclass(frozen=True)
class Plan:
    """All that is printed.

    Attributes:
        setup: Model, layout, batch.
        cluster: Rates.
        groups: Groups of a rank, as placed on nodes.
        reductions: Stock in fp32, stock in bf16, LoCo flat, and LoCo in two levels if the placement allows it.
        chosen: The one of LoCo's that training would take.
        topologies: For each group why.
        step: The rest of the step.
    """

    setup: Setup
    cluster: Cluster
    groups: tuple[Group, ...]
    reductions: tuple[Reduction, ...]
    chosen: Reduction
    topologies: tuple[str, ...]
    step: Step

    @property
    def plain_step(self) -> Step:
        """The step with nothing overlapped."""
        return dataclasses.replace(self.step, overlap_reduce=False, overlap_gather=False)

    def speed_ups(self, reduction: Reduction, step: Step) -> tuple[float, float]:
        """Whole-step speed-up over stock in fp32 and in bf16."""
        fp32, bf16 = (step.seconds(stock) for stock in self.reductions[:2])
        return fp32 / step.seconds(reduction), bf16 / step.seconds(reduction)


def make_plan(setup: Setup, cluster: Cluster) -> Plan:
    """Compute everything.

    Raises:
        ValueError: the ranks cannot be spread as asked, or ``--loco-topology two-level`` does not fit the placement.
    """
    from megatron_loco.collectives.placement import FLAT, TWO_LEVEL, choose_topology

    groups = setup.groups(cluster.world_size, cluster.gpus_per_node)
    possible = [choose_topology(group.nodes, "auto").kind == TWO_LEVEL for group in groups]
    asked = [choose_topology(group.nodes, setup.loco.topology) for group in groups]
    flat, two_level = (
        plan_cost.compressed(
            name,
            groups,
            cluster,
            setup.loco,
            two_level=levels,
            itemsize=setup.grad_bytes,
            overlap=setup.overlap_reduce,
        )
        for name, levels in (("LoCo flat", [False] * len(groups)), ("LoCo two-level", possible))
    )
    stock = [plan_cost.ring(f"stock {name}", groups, cluster, size) for name, size in (("fp32", 4), ("bf16", 2))]
    chosen = flat if all(topology.kind == FLAT for topology in asked) else two_level
    compute = 6 * setup.model.active * setup.tokens_per_gpu / cluster.flops * (1 + setup.bubble)
    gather = plan_cost.ring("parameters", groups, cluster, plan_cost.PARAM_BYTES)
    return Plan(
        setup=setup,
        cluster=cluster,
        groups=tuple(groups),
        reductions=(*stock, flat, *([two_level] if any(possible) else [])),
        chosen=chosen,
        topologies=tuple(
            f"{group.name}: groups of {len(group.nodes)} on {topology.num_nodes} node(s), "
            f"{topology.kind}: {topology.reason}"
            for group, topology in zip(groups, asked, strict=True)
        ),
        step=Step(
            compute_s=compute,
            gather_s=gather.seconds,
            num_micro_batches=setup.num_micro_batches,
            overlap_reduce=setup.overlap_reduce,
            overlap_gather=setup.overlap_gather,
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = _parser().parse_intermixed_args(argv)
    try:
        plan = make_plan(*_read(options))
        lines = verdict(plan)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(plan_report.as_json(plan, lines), indent=2))
    else:
        plan_report.show(plan, lines, options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-loco plan",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("words", metavar="CONFIG.yaml KEY=VALUE", nargs="*", help="a configuration and what to change in it")
    cluster = parser.add_argument_group("cluster")
    add = cluster.add_argument
    add("--gpu", choices=sorted(GPUS), required=True, help="type of GPU: peak rates of its data sheet")
    add("--nodes", type=int, help="default: run.nnodes of the configuration")
    add("--gpus-per-node", type=int, help="default: run.nproc_per_node if the configuration has it, else 8")
    add("--network-gbit", type=float, required=True, help="Gbit/s of one network link")
    add("--network-links", type=int, default=1, help="links per node; default: 1")
    model = parser.add_argument_group("without a configuration")
    add = model.add_argument
    add("--params", type=float, help="parameters of the model, e.g. 6.7e9")
    add("--tokens-per-gpu", type=float, help="tokens of a step, over GPUs")
    add("--tp", type=int, help="tensor parallel size; default: 1")
    add("--pp", type=int, help="pipeline parallel size; default: 1")
    add("--micro-batches", type=int, help="per step and data-parallel rank; default: 1")
    add("--grad-reduce-in-bf16", action="store_true", help="Megatron's gradient buffers are bf16; default: fp32")
    add("--overlap-grad-reduce", action="store_true")
    add("--overlap-param-gather", action="store_true")
    assumed = parser.add_argument_group("assumptions")
    add = assumed.add_argument
    add(
        "--tflops",
        type=float,
        help="attained per GPU, 6 FLOP per parameter and token; default: "
        f"{plan_cost.MODEL_FLOPS_UTILISATION:.0%} of the bf16 peak, which LLaMA-2 7B had on A100".replace("%", "%%"),
    )
    add("--network-efficiency", type=float, default=plan_cost.NETWORK_EFFICIENCY, help="attained share of the links")
    add("--nvlink-efficiency", type=float, default=plan_cost.NVLINK_EFFICIENCY, help="attained share of NVLink")
    add("--kernel-efficiency", type=float, default=plan_cost.KERNEL_EFFICIENCY, help="of memory, by encode and decode")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, in bytes and seconds")
    return parser


_FOR_PARAMS = ("tokens_per_gpu", "tp", "pp", "micro_batches")
_SWITCHES = ("grad_reduce_in_bf16", "overlap_grad_reduce", "overlap_param_gather")


def _read(options: argparse.Namespace) -> tuple[Setup, Cluster]:
    for name in ("nodes", "gpus_per_node", "network_links"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    for name in ("network_gbit", "tflops"):
        if getattr(options, name) is not None and not getattr(options, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be greater than 0, got {getattr(options, name)}")
    for name in ("network_efficiency", "nvlink_efficiency", "kernel_efficiency"):
        if not 0 < getattr(options, name) <= 1:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0 and at most 1, got {getattr(options, name)}")
    if options.params is not None:
        if options.nodes is None:
            raise ValueError("--params needs --nodes N")
        cluster = _cluster(options, options.nodes, options.gpus_per_node or GPUS_PER_NODE)
        return plan_setup.from_size(options, options.words, cluster.world_size), cluster
    if not options.words or "=" in options.words[0]:
        raise ValueError("name a CONFIG.yaml, or give --params N --tokens-per-gpu N; see --help")
    stray = [name for name in (*_FOR_PARAMS, *_SWITCHES) if getattr(options, name) not in (None, False)]
    if stray:
        flags = ", ".join("--" + name.replace("_", "-") for name in stray)
        raise ValueError(f"{flags}: for --params only; set it in the configuration, or as KEY=VALUE behind it")
    document, own = plan_setup.load(options.words[0], options.words[1:])
    in_file = own.run.nproc_per_node if "nproc_per_node" in document.get("run", {}) else GPUS_PER_NODE
    cluster = _cluster(options, options.nodes or own.run.nnodes, options.gpus_per_node or in_file)
    return plan_setup.from_document(document, own, cluster.world_size), cluster


def _cluster(options: argparse.Namespace, nodes: int, gpus_per_node: int) -> Cluster:
    peak_tflops, nvlink, memory = GPUS[options.gpu]
    return Cluster(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        network_links=options.network_links,
        network_bytes=options.network_gbit * 1e9 / 8 * options.network_links * options.network_efficiency,
        nvlink_bytes=nvlink * 1e9 * options.nvlink_efficiency,
        flops=(options.tflops or peak_tflops * plan_cost.MODEL_FLOPS_UTILISATION) * 1e12,
        kernel_bytes=memory * 1e9 * options.kernel_efficiency,
    )


if __name__ == "__main__":
    sys.exit(main())
