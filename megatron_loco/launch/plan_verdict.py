"""The last lines of ``megatron-loco plan``: whether LoCo helps, by how much, and if not, why."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_loco.launch.plan import Plan

WORTH_IT = 1.02
"""Smaller gains are within what the assumptions are wrong by."""

MOSTLY_FIXED = 0.7
"""Above this share of the bf16 reduction's time, LoCo's is no longer made of bytes between nodes."""

LATENCY_S = 1e-3
"""A reduction that takes less is made of latency, which is not modelled."""


def verdict(plan: Plan) -> list[str]:
    """Return sentences; the first begins ``verdict: LoCo helps``, with ``against fp32 gradients only`` if so, or
    ``verdict: LoCo will not help here``.

    Both baselines count: what the configuration uses, and bf16 gradients, which cost a flag and nothing else.
    """
    over_fp32, over_bf16 = plan.speed_ups(plan.chosen, plan.step)
    baseline = over_bf16 if plan.setup.grad_bytes == 2 else over_fp32
    as_set = "overlapped as set" if plan.setup.overlap_reduce or plan.setup.overlap_gather else "without overlap"
    figures = f"{_percent(over_fp32)} than stock with fp32 gradients, {_percent(over_bf16)} than with bf16 ({as_set})"
    if 0 < plan.reductions[1].transfer_s < LATENCY_S:
        return [
            "verdict: LoCo will not help here, because the model is so small that latency decides, not bytes.",
            f"  A bf16 reduction would take {plan.reductions[1].transfer_s * 1e3:.2g} ms if latency were nothing.",
        ]
    if min(baseline, over_bf16) >= WORTH_IT:
        lines = ["verdict: LoCo helps.", f"  The step is {figures}."]
    elif baseline >= WORTH_IT:
        lines = [
            "verdict: LoCo helps against fp32 gradients only.",
            f"  The step is {figures}.",
            f"  --grad-reduce-in-bf16 alone does about as well. More LoCo cannot do, because {_reason(plan)}.",
        ]
    else:
        lines = [f"verdict: LoCo will not help here, because {_reason(plan)}."]
        lines += [f"  The step would be {figures}."] if plan.chosen.sent_bytes else []
    return [*lines, *_advice(plan)]


def _reason(plan: Plan) -> str:
    bf16, chosen = plan.reductions[1], plan.chosen
    if not bf16.sent_bytes:
        return "every gradient belongs to one data-parallel rank (DP = 1): nothing is reduced"
    if not bf16.internode_bytes:
        return "the data-parallel groups lie inside one node, where NVLink carries the gradients"
    if chosen.internode_bytes > bf16.internode_bytes:
        times = chosen.internode_bytes / bf16.internode_bytes
        return (
            f"{chosen.name} sends {times:.1f} times as much between nodes as a bf16 ring: an all-to-all of several "
            "data-parallel ranks per node crosses the network once for each of them"
        )
    bare, links = plan.plain_step, plan.cluster.network_links
    if plan.setup.overlap_reduce and bare.seconds(bf16) / bare.seconds(chosen) >= WORTH_IT:
        shows = (plan.step.seconds(bf16) - plan.step.compute_s) / plan.step.seconds(bf16)
        return (
            "overlap hides the stock reduction behind the backward pass, or all but a little of it; what shows of the "
            f"communication, {shows:.0%} of the step, is mostly the all-gather of the parameters, which stays as it is"
        )
    network = f"{plan.cluster.network_bytes / 1e9:.0f} GB/s per node" + (f" over {links} links" if links > 1 else "")
    if chosen.seconds > MOSTLY_FIXED * bf16.seconds:
        return (
            f"the network is fast ({network}): with the hop inside the node, encode and decode LoCo takes "
            f"{chosen.seconds * 1e3:.3g} ms, a bf16 reduction {bf16.seconds * 1e3:.3g} ms"
        )
    share = bf16.seconds / bare.seconds(bf16)
    return f"a bf16 reduction takes {share:.1%} of the step on this network ({network}), so there is little to save"


def _advice(plan: Plan) -> list[str]:
    bf16, flat = plan.reductions[1:3]
    best = min(plan.reductions[2:], key=lambda reduction: reduction.seconds)
    if plan.chosen.name == flat.name and best.name != flat.name:
        gain = _percent(plan.speed_ups(best, plan.step)[1])
        return [f"  --loco-topology auto would take two levels: {gain} than stock with bf16 gradients."]
    if plan.chosen.name != flat.name and flat.internode_bytes > bf16.internode_bytes:
        times = flat.internode_bytes / bf16.internode_bytes
        if times < 1.05:
            return ["  A flat exchange would send as much between nodes as a bf16 ring; two levels do not."]
        return [
            f"  A flat exchange would send {times:.1f} times as much between nodes as a bf16 ring; two levels do not."
        ]
    return []


def _percent(ratio: float) -> str:
    if abs(ratio - 1) < 0.0005:
        return "0.0% faster"
    return f"{abs(ratio - 1):.1%} {'faster' if ratio > 1 else 'slower'}"
