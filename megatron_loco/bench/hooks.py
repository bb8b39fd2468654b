"""LoCo's DDP hook beside PyTorch's own ones: loss, and bytes that leave a rank per step.

``python -m megatron_loco.bench.hooks [--steps 200] [--seeds 1 2 3] [--ranks 2] [--json]``

The quick start's LLaMA and corpus in plain PyTorch, on CPU ranks over Gloo: the same weights, data and optimizer for
all arms of a seed. Every arm is DDP with a communication hook:

* *fp32*: torch's ``allreduce_hook``, what DDP does without a hook; *bf16*, *fp16*: torch's compress hooks.
* *PowerSGD*: torch's ``powerSGD_hook`` with error feedback and warm start, at two ranks of its approximation.
* *LoCo*: 8 and 4 bits to the owner of a shard, and back in fp32 or bf16; *plain 4 bits* without error feedback.

PowerSGD and LoCo begin after the same number of exact steps. *MB/step* is counted at ``torch.distributed``: what each
collective of the compressed steps moves per rank, an all-reduce as a ring does it. For LoCo it must agree with its own
counters, or the exit status is 1.

Validation loss is over batches that no arm trains on. With several seeds the table has the mean, and the standard error
of the difference from fp32.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from megatron_loco import LoCoConfig
from megatron_loco.bench.llama import Batches, Llama
from megatron_loco.bench.machine import describe_machine
from megatron_loco.integrations.pytorch import ddp
from megatron_loco.patching import Patch, apply

EXACT_STEPS = 10
VALIDATION_STEP = 10**6
"""Where the batches for validation begin."""


@dataclass(frozen=True)
class Result:
    """One training run.

    Attributes:
        arm: Name of the hook.
        seed: Of weights and data.
        loss: Validation loss, nats per token.
        step_bytes: What a rank sends in one compressed step.
        formula_bytes: The same by LoCo's counters; ``None`` for the others.
    """

    arm: str
    seed: int
    loss: float
    step_bytes: float
    formula_bytes: float | None


def _power_sgd(rank: int) -> Callable[[DistributedDataParallel], None]:
    def register(model: DistributedDataParallel) -> None:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=EXACT_STEPS, warm_start=True
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return register


def _default(hook: Callable[..., Any]) -> Callable[[DistributedDataParallel], None]:
    return lambda model: model.register_comm_hook(None, hook)


def _loco(
    gather_dtype: torch.dtype | None = None, **settings: Any
) -> Callable[[DistributedDataParallel], ddp.LoCoState]:
    config = LoCoConfig(warmup_steps=EXACT_STEPS, **settings)
    return lambda model: ddp.apply(model, ddp.LoCoState(config, gather_dtype=gather_dtype))


ARMS: dict[str, Callable[[DistributedDataParallel], ddp.LoCoState | None]] = {
    "fp32": _default(default_hooks.allreduce_hook),
    "bf16": _default(default_hooks.bf16_compress_hook),
    "fp16": _default(default_hooks.fp16_compress_hook),
    "PowerSGD rank 4": _power_sgd(4),
    "PowerSGD rank 16": _power_sgd(16),
    "LoCo 8 bits, back in bf16": _loco(torch.bfloat16, bits=8),
    "LoCo 4 bits, back in fp32": _loco(bits=4),
    "LoCo 4 bits, back in bf16": _loco(torch.bfloat16, bits=4),
    "plain 4 bits, back in bf16": _loco(torch.bfloat16, bits=4, error_bits=0),
}


class _Counter:
    # Bytes that collectives of a hook move per rank.
    def __init__(self, world_size: int) -> None:
        self.sent = 0.0
        self._share = (world_size - 1) / world_size

    def patches(self) -> list[Patch]:
        def counting(size: Callable[..., float]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
            def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
                def collective(*args: Any, **kwargs: Any) -> Any:
                    self.sent += self._share * size(*args)
                    return stock(*args, **kwargs)

                return collective

            return wrap

        sizes: dict[str, Callable[..., float]] = {
            "all_reduce": lambda tensor, *_: 2 * tensor.nbytes,
            "all_gather_into_tensor": lambda output, *_: output.nbytes,
            "all_to_all_single": lambda output, input, *_: input.nbytes,
        }
        return [
            Patch(target=f"torch.distributed:{name}", kind="wrap", new=counting(size), why="counts what a hook sends")
            for name, size in sizes.items()
        ]


def _train(arm: str, seed: int, steps: int, data_dir: str) -> Result:
    torch.manual_seed(seed)
    model = DistributedDataParallel(Llama(), bucket_cap_mb=25)
    state = ARMS[arm](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = Batches(rank, seed=seed, data_dir=data_dir)
    counter = _Counter(world_size)
    counted = 0
    for step in range(steps):
        with apply(counter.patches() if step == steps - 1 else []):
            model(batches(step)).backward()
        counted += step == steps - 1
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        losses = torch.stack([model.module(batches(VALIDATION_STEP + i)) for i in range(16)])
    loss: Tensor = losses.mean()
    dist.all_reduce(loss)
    formula = None
    if state is not None:
        traffic = state.model_states.traffic
        exact = EXACT_STEPS * 2 * (world_size - 1) / world_size * sum(p.nbytes for p in model.parameters())
        formula = (traffic.sent_bytes - exact) / (steps - EXACT_STEPS)
    return Result(arm, seed, loss.item() / world_size, counter.sent, formula)


def _rank(rank: int, world_size: int, folder: str, steps: int, seeds: Sequence[int], arms: Sequence[str]) -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    results = [_train(arm, seed, steps, "data") for seed in seeds for arm in arms]
    if rank == 0:
        with open(f"{folder}/results.json", "w", encoding="utf-8") as file:
            json.dump([asdict(result) for result in results], file)
    dist.destroy_process_group()


def run(world_size: int, steps: int, seeds: Sequence[int], arms: Sequence[str]) -> list[Result]:
    """Train every arm with every seed.

    Args:
        world_size: Ranks.
        steps: Of each run; more than the exact ones.
        seeds: Of weights and data.
        arms: Names in :data:`ARMS`.

    Returns:
        Results, by seed and arm.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (world_size, folder, steps, seeds, arms), nprocs=world_size)  # type: ignore[attr-defined, no-untyped-call]
        with open(f"{folder}/results.json", encoding="utf-8") as file:
            return [Result(**row) for row in json.load(file)]


def agrees(result: Result) -> bool:
    """Whether what was counted is what LoCo says."""
    return result.formula_bytes is None or math.isclose(result.step_bytes, result.formula_bytes, rel_tol=1e-6)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m megatron_loco.bench.hooks", description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args(argv)
    if args.ranks < 2 or args.steps <= EXACT_STEPS:
        print(f"error: --ranks must be at least 2, and --steps more than {EXACT_STEPS}", file=sys.stderr)
        return 2
    results = run(args.ranks, args.steps, args.seeds, args.arms)
    machine = describe_machine()
    if args.json:
        print(json.dumps({**machine, "results": [asdict(result) for result in results]}))
    else:
        _print_table(machine, args, results)
    wrong = [result for result in results if not agrees(result)]
    for result in wrong:
        print(
            f"error: {result.arm}: counted {result.step_bytes:,.0f} bytes per step, LoCo says {result.formula_bytes}",
            file=sys.stderr,
        )
    return 1 if wrong else 0


def _print_table(machine: dict[str, Any], args: argparse.Namespace, results: list[Result]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(
        f"torch {machine['torch']}, {machine['cores']} cores, {args.ranks} Gloo ranks, {args.steps} steps, seeds "
        f"{', '.join(map(str, args.seeds))}; loss in nats per token"
    )
    table = Table("hook", "validation loss", "minus fp32", "MB/step", "less than fp32")
    of_arm = {arm: [result for result in results if result.arm == arm] for arm in args.arms}
    base = {result.seed: result for result in of_arm.get("fp32", [])}
    for arm, runs in of_arm.items():
        row = [arm, f"{statistics.mean(r.loss for r in runs):.4f}", "", f"{runs[0].step_bytes / 1e6:.3f}", ""]
        if base:
            differences = [result.loss - base[result.seed].loss for result in runs]
            row[2] = f"{statistics.mean(differences):+.4f}"
            if len(runs) > 1 and arm != "fp32":
                row[2] += f" ± {statistics.stdev(differences) / math.sqrt(len(runs)):.4f}"
            row[4] = f"{base[runs[0].seed].step_bytes / runs[0].step_bytes:.2f}x"
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
