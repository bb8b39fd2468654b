"""The share of a training step that encode and decode take: a configuration is run, with a clock around both.

``python -m megatron_loco.bench.step_share CONFIG.yaml [KEY=VALUE ...] [--json PATH]``

The run is that of ``python -m megatron_loco.launch``; only the two operations of the backend, and Megatron's
``train_step``, are timed on every rank. What a step waits for the network is in the step, but not in the two. Steps of
the warm-up, which encode nothing, and the first step after it are left out. Needs CPU ranks: on a GPU the operations
run beside the CPU's clock.

Example: ``python -m megatron_loco.bench.step_share configs/llama_quickstart.yaml loco.backend=reference``
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console

from megatron_loco.bench.machine import describe_machine
from megatron_loco.collectives.state import BucketState
from megatron_loco.launch import __main__ as launcher
from megatron_loco.launch import entry, torchrun

_FOLDER = "MEGATRON_LOCO_STEP_SHARE"


@dataclass
class Step:
    """Seconds of one training step on one rank."""

    total: float = 0.0
    encode: float = 0.0
    decode: float = 0.0


class _Clock:
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._current = Step()

    def time_operation(self, kind: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def timed(*args: Any, **kwargs: Any) -> Any:
            before = time.perf_counter()
            result = operation(*args, **kwargs)
            setattr(self._current, kind, getattr(self._current, kind) + time.perf_counter() - before)
            return result

        return timed

    def time_step(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train_step)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._current = Step()
            before = time.perf_counter()
            result = train_step(*args, **kwargs)
            self._current.total = time.perf_counter() - before
            self.steps.append(self._current)
            return result

        return timed


def _run_rank(folder: Path) -> None:
    clock = _Clock()
    initialise = BucketState.__init__

    def with_clock(state: BucketState, *args: Any, **kwargs: Any) -> None:
        initialise(state, *args, **kwargs)
        for name, kind in (("encode", "encode"), ("decode_sum", "decode")):
            setattr(state.backend, name, clock.time_operation(kind, getattr(state.backend, name)))

    def with_timed_steps(script: Path | None) -> None:
        from megatron.training import training

        with mock.patch.object(training, "train_step", clock.time_step(training.train_step)):
            train(script)

    train = entry._train
    with mock.patch.object(BucketState, "__init__", with_clock), mock.patch.object(entry, "_train", with_timed_steps):
        entry.main(sys.argv[1:])
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps([asdict(step) for step in clock.steps]))


def summarise(ranks: list[list[Step]]) -> dict[str, Any]:
    """Put the steps of all ranks together.

    Returns:
        Medians over steps and ranks of step, encode and decode (seconds) and of their share of the step, with its
        middle half; ready for JSON.

    Raises:
        ValueError: nothing was encoded after the first compressed step.
    """
    counted = [step for steps in ranks for step in [s for s in steps if s.encode][1:]]
    if not counted:
        raise ValueError("no step was compressed; train for more iterations than loco.warmup_steps")
    shares = [(step.encode + step.decode) / step.total for step in counted]
    low, _, high = statistics.quantiles(shares, n=4, method="inclusive") if len(shares) > 1 else [shares[0]] * 3
    return {
        "steps": len(counted),
        **{f"{name}_seconds": statistics.median(getattr(s, name) for s in counted) for name in asdict(counted[0])},
        "share": statistics.median(shares),
        "share_quartiles": [low, high],
    }


def main(argv: list[str] | None = None) -> int:
    """Run the configuration and print the share; the exit status is that of the run."""
    parser = argparse.ArgumentParser(prog="python -m megatron_loco.bench.step_share", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*")
    parser.add_argument("--json", metavar="PATH", help="write the figures there")
    args = parser.parse_intermixed_args(argv)
    command = torchrun.command

    def timed_command(*arguments: Any, **kwargs: Any) -> list[str]:
        module = "megatron_loco.bench.step_share"
        return [module if word == "megatron_loco.launch.entry" else word for word in command(*arguments, **kwargs)]

    with tempfile.TemporaryDirectory() as folder:
        with mock.patch.object(torchrun, "command", timed_command), mock.patch.dict(os.environ, {_FOLDER: folder}):
            status = launcher.main([args.config, *args.overrides])
        if status:
            return status
        files = sorted(Path(folder).glob("rank*.json"))
        ranks = [[Step(**step) for step in json.loads(file.read_text())] for file in files]
    try:
        result = {"machine": describe_machine(), "ranks": len(ranks), **summarise(ranks)}
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    low, high = result["share_quartiles"]
    console = Console()
    console.print(", ".join(f"{name} {value}" for name, value in result["machine"].items()), highlight=False)
    console.print(
        f"{result['steps']} steps of {result['ranks']} rank(s): step {result['total_seconds'] * 1e3:.1f} ms, encode "
        f"{result['encode_seconds'] * 1e3:.2f} ms, decode {result['decode_seconds'] * 1e3:.2f} ms; share of the step "
        f"{result['share']:.2%} [{low:.2%}, {high:.2%}]",
        highlight=False,
    )
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    if _FOLDER in os.environ:
        _run_rank(Path(os.environ[_FOLDER]))
    else:
        sys.exit(main())
