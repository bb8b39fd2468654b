"""The torchrun command of a run, its environment, and running it with signals passed on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

SHUTDOWN_TIMEOUT_S = 120
"""Time for the ranks to write a checkpoint after a signal; torchrun's own 30 s are short for that."""

FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""SIGUSR1: Slurm's advance notice (``--exit-signal SIGUSR1`` makes Megatron save). SIGHUP: the terminal went away."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the nodes of a run meet; ``None`` fields never stand for localhost, there is simply one node then."""

    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    timeout_s: int = 900

    @classmethod
    def from_environment(cls, nnodes: int, environment: Mapping[str, str], timeout_s: int = 900) -> Rendezvous:
        """Read NODE_RANK, MASTER_ADDR and MASTER_PORT, which more than one node needs.

        Args:
            nnodes: Nodes of the run.
            environment: Environment variables.
            timeout_s: Seconds for all nodes to come.

        Returns:
            The meeting point.

        Raises:
            ValueError: a variable is missing or is no number in its range. There is no fallback to localhost: each node
                would wait for, or train as, a job of its own.
        """
        if nnodes == 1:
            return cls()
        missing = [v for v in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if not environment.get(v)]
        if missing:
            raise ValueError(f"run.nnodes is {nnodes}, but the environment lacks {', '.join(missing)}")
        rank, port = environment["NODE_RANK"], environment["MASTER_PORT"]
        if not rank.isdecimal() or int(rank) >= nnodes:
            raise ValueError(
                f"NODE_RANK must be a number from 0 to {nnodes - 1} (run.nnodes is {nnodes}), got {rank!r}"
            )
        if not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise ValueError(f"MASTER_PORT must be a port number, got {port!r}")
        return cls(nnodes, int(rank), environment["MASTER_ADDR"], int(port), timeout_s)


def rank_environment(
    settings: Mapping[str, str], *, nproc_per_node: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the whole environment of the ranks.

    Args:
        settings: The ``env`` section, which wins.
        nproc_per_node: Ranks that share the cores of this node.
        environment: The environment of the launcher.

    Returns:
        The launcher's environment, with ``OMP_NUM_THREADS`` so that the ranks share the cores, unbuffered output, this
        Python's folder first in ``PATH`` (a Megatron-LM checkout runs ``python3`` to build its index builder), and the
        settings.
    """
    cores = len(os.sched_getaffinity(0))
    defaults = {"OMP_NUM_THREADS": str(max(1, cores // nproc_per_node))}
    path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    return {**defaults, **environment, "PYTHONUNBUFFERED": "1", "PATH": path, **settings}


def command(
    megatron_argv: Sequence[str], *, rendezvous: Rendezvous, nproc_per_node: int, device: str, script: Path | None
) -> list[str]:
    """Return the torchrun command.

    Args:
        megatron_argv: Arguments of Megatron and LoCo.
        rendezvous: Where the nodes meet.
        nproc_per_node: Ranks on this node.
        device: ``cpu`` or ``cuda``.
        script: The training script, or ``None`` for the one that the entry point brings.

    Returns:
        The words of the command.
    """
    words = [sys.executable, "-m", "megatron_loco.launch.agent"]
    if rendezvous.nnodes == 1:
        words += ["--standalone"]
    else:
        words += [f"--nnodes={rendezvous.nnodes}", f"--node-rank={rendezvous.node_rank}"]
        words += [f"--master-addr={rendezvous.master_addr}", f"--master-port={rendezvous.master_port}"]
        words += [f"--rdzv-conf=timeout={rendezvous.timeout_s}"]
    words += [f"--nproc-per-node={nproc_per_node}"]
    # by default torchrun dies of SIGUSR1 instead of passing it on
    words += ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", f"--shutdown-timeout={SHUTDOWN_TIMEOUT_S}"]
    words += ["-m", "megatron_loco.launch.entry", "--device", device]
    if script is not None:
        words += ["--script", str(script)]
    return [*words, "--", *megatron_argv]


def run(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command to its end, passing signals on to it.

    Args:
        words: The command.
        environment: Its whole environment.

    Returns:
        Its exit status; 128 + the number of the signal that ended it, as a shell says it.
    """
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward(signum: int, _frame: FrameType | None) -> None:
        if child is None:
            received.append(signum)
        elif child.poll() is None:
            child.send_signal(signum)

    # handlers first: a signal between start and handler would end the launcher and leave the ranks behind
    old = {signum: signal.signal(signum, forward) for signum in FORWARDED_SIGNALS}
    try:
        # its own group: Ctrl-C would otherwise reach torchrun twice, from the terminal and from here
        child = subprocess.Popen(list(words), env=dict(environment), process_group=0, stdin=subprocess.DEVNULL)
        for signum in received:
            child.send_signal(signum)
        status = child.wait()
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)
    return status if status >= 0 else 128 - status
