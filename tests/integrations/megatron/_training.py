"""Whole runs of Megatron's training loop on Gloo ranks, and what they logged, bit for bit."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_loco.launch.report import Run
from tests._releases import environment

MODEL = (
    "--transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion --no-masked-softmax-fusion"
    " --no-persist-layer-norm --no-rope-fusion --attention-backend unfused --no-bias-swiglu-fusion"
    " --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
    " --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
    " --attention-dropout 0 --hidden-dropout 0"
    " --micro-batch-size 2 --global-batch-size 8 --lr 2e-3 --min-lr 1e-4 --lr-decay-style cosine --clip-grad 1.0 --bf16"
    " --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-workers 0"
    " --use-distributed-optimizer --log-interval 1 --log-params-norm --eval-iters 1 --eval-interval 1000"
).split()
"""A LLaMA of 0.2 million parameters on generated data."""

OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
    " --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 96"
).split()

TIMEOUT_S = 300
IMPORT_LINE = ("tests.integrations.megatron._import_line_entry",)
STOCK = ("tests.integrations.megatron._stock_entry",)
LOCO = ("megatron_loco.launch.entry", "--device", "cpu", "--")
NOT_COMPARED = ("iteration-time", "loco/")


def train(
    folder: Path,
    *flags: str,
    entry: tuple[str, ...] = LOCO,
    num_ranks: int = 2,
    iterations: int = 8,
    torchrun: bool = False,
    megatron: Path | None = None,
) -> Run:
    """Train and return what was logged.

    Args:
        folder: Where TensorBoard files go; its name is the run's.
        flags: Megatron flags besides :data:`MODEL`.
        entry: :data:`STOCK`, :data:`LOCO` or :data:`IMPORT_LINE`.
        num_ranks: World size.
        iterations: Training steps.
        torchrun: Start the ranks as users do, each a new process under torchrun's agent. Else they are forked from a
            server that has imported Megatron (:mod:`_rank_server`), which is five times as fast.
        megatron: Folder that holds the ``megatron`` of another release (:mod:`tests._releases`); by fork only.

    Raises:
        AssertionError: the run failed; with the end of its output.
    """
    output = launch(
        folder, *flags, entry=entry, num_ranks=num_ranks, iterations=iterations, torchrun=torchrun, megatron=megatron
    )
    assert output.returncode == 0, output.stdout[-6000:]
    return Run.read(folder)


def launch(
    folder: Path,
    *flags: str,
    entry: tuple[str, ...] = LOCO,
    num_ranks: int = 2,
    iterations: int = 8,
    torchrun: bool = False,
    megatron: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Like :func:`train`, but return the outcome, whose ``stdout`` holds both streams of all ranks."""
    arguments = [
        *(*entry[1:], *MODEL, "--train-iters", str(iterations), "--tensorboard-dir", str(folder / "tensorboard")),
        *flags,
    ]
    if torchrun:
        assert megatron is None
        return _launch_with_torchrun(entry[0], arguments, num_ranks)
    return _launch_by_fork(entry[0], arguments, num_ranks, megatron)


def _launch_with_torchrun(module: str, arguments: list[str], num_ranks: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)),
            *("-m", module, *arguments),
        ],
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )


def _launch_by_fork(
    module: str, arguments: list[str], num_ranks: int, megatron: Path | None = None
) -> subprocess.CompletedProcess[str]:
    server = _servers.get(megatron)
    if server is None or server.poll() is not None:
        server = _servers[megatron] = _start_server(megatron)
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        request = {
            "module": module,
            "arguments": arguments,
            "num_ranks": num_ranks,
            "environment": _environment(megatron),
            "output": output.name,
        }
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], TIMEOUT_S)[0]:
            stop_server(megatron)
            raise AssertionError(f"no end after {TIMEOUT_S} s:\n{output.read()[-6000:]}")
        answer = server.stdout.readline()
        assert answer, f"the server ended:\n{output.read()[-6000:]}"
        return subprocess.CompletedProcess([module, *arguments], int(answer), output.read())


_servers: dict[Path | None, subprocess.Popen[str]] = {}
"""By the folder of their Megatron; ``None``: the installed one."""


def _environment(megatron: Path | None = None) -> dict[str, str]:
    return {**(os.environ if megatron is None else environment(megatron)), "OMP_NUM_THREADS": "1"}


def _start_server(megatron: Path | None) -> subprocess.Popen[str]:
    if not _servers:
        atexit.register(_stop_servers)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.integrations.megatron._rank_server"],
        env={**_environment(megatron), "TORCHDYNAMO_DISABLE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def stop_server(megatron: Path | None) -> None:
    """End the server of a Megatron and its ranks: each keeps half a gigabyte."""
    server = _servers.pop(megatron, None)
    if server is None:  # it did not start, and whoever wanted it says why
        return
    # The whole session: its ranks too.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def _stop_servers() -> None:
    for megatron in list(_servers):
        stop_server(megatron)


def differences(run: Run, other: Run, first_iteration: int = 1) -> list[str]:
    """Name every scalar that two runs logged differently from ``first_iteration`` on, times and LoCo's own apart."""

    def compared(of: Run) -> dict[tuple[str, int], float]:
        return {
            (tag, iteration): value
            for tag, values in of.scalars.items()
            for iteration, value in values.items()
            if not tag.startswith(NOT_COMPARED) and not tag.endswith("vs samples") and iteration >= first_iteration
        }

    mine, theirs = compared(run), compared(other)
    assert ("lm loss", first_iteration) in mine, f"{run.name} logged no loss at iteration {first_iteration}"
    return [
        f"{tag} at {iteration}: {mine.get((tag, iteration))} != {theirs.get((tag, iteration))}"
        for tag, iteration in sorted(mine.keys() | theirs.keys())
        if mine.get((tag, iteration)) != theirs.get((tag, iteration))
    ]
