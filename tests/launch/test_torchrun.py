"""The command, the environment and the signals of torchrun."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from megatron_loco.launch import torchrun
from megatron_loco.launch.torchrun import Rendezvous

CLUSTER = {"NODE_RANK": "1", "MASTER_ADDR": "node a", "MASTER_PORT": "29500"}
SIGNALS = ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", "--shutdown-timeout=120"]


def test_command_on_one_node() -> None:
    words = torchrun.command(
        ["--save", "a b", "--bf16"], rendezvous=Rendezvous(), nproc_per_node=2, device="cpu", script=None
    )
    assert words == [
        *(sys.executable, "-m", "megatron_loco.launch.agent", "--standalone", "--nproc-per-node=2", *SIGNALS),
        *("-m", "megatron_loco.launch.entry", "--device", "cpu", "--", "--save", "a b", "--bf16"),
    ]


@pytest.mark.kind(32)
def test_command_on_two_nodes_with_a_script() -> None:
    rendezvous = Rendezvous.from_environment(2, CLUSTER)
    words = torchrun.command(
        ["--bf16"], rendezvous=rendezvous, nproc_per_node=8, device="cuda", script=Path("/m n/pretrain_gpt.py")
    )
    assert words == [
        *(sys.executable, "-m", "megatron_loco.launch.agent", "--nnodes=2", "--node-rank=1", "--master-addr=node a"),
        *("--master-port=29500", "--rdzv-conf=timeout=900", "--nproc-per-node=8", *SIGNALS),
        *("-m", "megatron_loco.launch.entry", "--device", "cuda", "--script", "/m n/pretrain_gpt.py", "--", "--bf16"),
    ]


def test_one_node_needs_nothing_and_ignores_the_cluster() -> None:
    assert Rendezvous.from_environment(1, CLUSTER) == Rendezvous(1, 0, None, None)


@pytest.mark.kind(32)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict.fromkeys(CLUSTER, ""), "the environment lacks NODE_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"MASTER_ADDR": ""}, "run.nnodes is 2, but the environment lacks MASTER_ADDR"),
        ({"NODE_RANK": "2"}, "NODE_RANK must be a number from 0 to 1"),
        ({"NODE_RANK": "-1"}, "NODE_RANK must be a number from 0 to 1"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT must be a port number, got 'http'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT must be a port number"),
    ],
)
def test_two_nodes_never_fall_back_to_localhost(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rendezvous.from_environment(2, {**CLUSTER, **changes})


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    base = {"PATH": "/bin", "A": "old"}
    ranks = torchrun.rank_environment({"A": "new"}, nproc_per_node=3, environment=base)
    path = f"{Path(sys.executable).parent}:/bin"
    assert ranks == {"PATH": path, "A": "new", "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"}
    assert base == {"PATH": "/bin", "A": "old"}
    ranks = torchrun.rank_environment({}, nproc_per_node=16, environment={})
    assert ranks["OMP_NUM_THREADS"] == "1"
    ranks = torchrun.rank_environment({}, nproc_per_node=2, environment={"OMP_NUM_THREADS": "7"})
    assert ranks["OMP_NUM_THREADS"] == "7"
    ranks = torchrun.rank_environment({"OMP_NUM_THREADS": "5"}, nproc_per_node=2, environment={"OMP_NUM_THREADS": "7"})
    assert ranks["OMP_NUM_THREADS"] == "5"


def test_status_and_environment_of_the_command() -> None:
    assert torchrun.run([sys.executable, "-c", "import os; exit(int(os.environ['N']))"], {"N": "7"}) == 7
    assert torchrun.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], {}) == 128 + 9


CHILD = """
import os, pathlib, signal, sys
signals = {signal.Signals[name] for name in sys.argv[2:]}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
pathlib.Path(sys.argv[1]).touch()
received = signal.sigtimedwait(signals, 60)  # so that a signal that is never sent fails the test, not hangs it
exit(40 + received.si_signo if received else 1)
"""


@pytest.mark.parametrize("signum", torchrun.FORWARDED_SIGNALS)
def test_signals_reach_the_command_and_its_end_is_awaited(tmp_path: Path, signum: signal.Signals) -> None:
    ready = tmp_path / "ready"
    stop = threading.Event()

    def send_when_ready() -> None:
        while not ready.exists():
            if stop.wait(0.01):
                return
        os.kill(os.getpid(), signum)

    before = signal.getsignal(signum)
    sender = threading.Thread(target=send_when_ready)
    sender.start()
    try:
        words = [sys.executable, "-c", CHILD, str(ready), *(s.name for s in torchrun.FORWARDED_SIGNALS)]
        assert torchrun.run(words, os.environ) == 40 + signum
    finally:
        stop.set()
        sender.join()
    assert signal.getsignal(signum) == before
