"""torchrun as the launcher starts it: what only ranks can find ends them all, on every node, and is told in a line."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import textwrap
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ErrorHandler, ProcessFailure

from megatron_loco.launch import agent, torchrun
from tests.launch._processes import gone

ROOT = Path(__file__).parents[2]


def start(words: Sequence[str], program: Path, mark: str) -> subprocess.Popen[str]:
    """The launcher's torchrun command, around another program."""
    words = [*words[: words.index("megatron_loco.launch.entry") - 1], str(program)]
    return subprocess.Popen(
        words,
        env={**os.environ, "PYTHONPATH": str(ROOT), mark: "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def node(rank: int, port: int, timeout_s: int) -> list[str]:
    environment = {"NODE_RANK": str(rank), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    rendezvous = torchrun.Rendezvous.from_environment(2, environment, timeout_s)
    return torchrun.command([], rendezvous=rendezvous, nproc_per_node=1, device="cpu", script=None)


FAILING = """
import os, time
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    if os.environ["RANK"] == "1":
        raise ValueError("the reason")
    time.sleep(300)

main()
"""


def test_a_rank_that_fails_ends_the_others_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    mark = f"RUN_{uuid.uuid4().hex}"
    words = torchrun.command([], rendezvous=torchrun.Rendezvous(), nproc_per_node=2, device="cpu", script=None)
    run = start(words, tmp_path / "failing.py", mark)
    _, err = run.communicate(timeout=120)
    assert run.returncode == 1
    assert err.splitlines()[-1] == f"error: on {socket.gethostname()} rank 1: ValueError: the reason"
    assert "ChildFailedError" not in err  # torchrun's own traceback
    assert gone(mark) == []


def test_causes_are_told_once_and_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded(rank: int, error: Exception, second: int) -> ProcessFailure:
        file = tmp_path / f"rank{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        monkeypatch.setattr(time, "time", lambda: float(second))
        ErrorHandler().record_exception(error)
        return ProcessFailure(rank, 99, 1, str(file))

    failures = {
        0: recorded(0, RuntimeError("connection closed"), 12),
        1: ProcessFailure(1, 99, -signal.SIGTERM, "<N/A>"),  # by torchrun, after the first
        2: recorded(2, RuntimeError("connection closed"), 12),
        3: recorded(3, ValueError("the reason\nin two lines"), 11),
    }
    host = socket.gethostname()
    told = agent._failures(ChildFailedError("entry", failures))
    assert told == f"on {host} rank 3: ValueError: the reason; then ranks 0, 2: RuntimeError: connection closed"
    told = agent._failures(ChildFailedError("entry", {1: failures[1]}))
    assert told == f"on {host} rank 1: killed by SIGTERM"


@pytest.mark.kind(32)
def test_nodes_that_do_not_meet_end_in_time(tmp_path: Path, taken_port: int, free_port: Callable[[], int]) -> None:
    (tmp_path / "never.py").write_text("raise SystemExit('ranks were started')\n")
    mark = f"RUN_{uuid.uuid4().hex}"
    alone, nobody = free_port(), free_port()
    # All at once: nobody comes; nobody is there; the port was taken after the launcher had looked.
    runs = [
        start(words, tmp_path / "never.py", mark)
        for words in (node(0, alone, 5), node(1, nobody, 5), node(0, taken_port, 300))
    ]
    said = [run.communicate(timeout=120)[1].splitlines()[-1] for run in runs]
    assert [run.returncode for run in runs] == [1, 1, 1]
    assert said[0].startswith(f"error: MASTER_ADDR:MASTER_PORT = localhost:{alone}: not all 2 nodes came (")
    assert said[1].startswith(f"error: MASTER_ADDR:MASTER_PORT = localhost:{nobody}: no meeting with node 0 (")
    where = f"MASTER_ADDR:MASTER_PORT = localhost:{taken_port}"
    assert said[2].startswith(f"error: {where}: the port is taken on this machine by another process")
    assert gone(mark) == []


LOSING = """
import os, signal
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(1000):
    if step == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.kind(21)
def test_a_rank_that_is_lost_on_one_node_ends_the_other_node(tmp_path: Path, free_port: Callable[[], int]) -> None:
    (tmp_path / "losing.py").write_text(LOSING)
    mark = f"RUN_{uuid.uuid4().hex}"
    port = free_port()
    runs = [start(node(rank, port, 60), tmp_path / "losing.py", mark) for rank in range(2)]
    said = [run.communicate(timeout=120)[1].splitlines()[-1] for run in runs]
    assert [run.returncode for run in runs] == [1, 1]
    host = socket.gethostname()
    assert said[0] == f"error: on {host} rank 0: exit status 1, the messages above say why"
    assert said[1].startswith(f"error: on {host} rank 1: killed by SIGKILL")
    assert gone(mark) == []


def test_a_signal_ends_the_ranks_and_is_the_status(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    (tmp_path / "waiting.py").write_text(
        textwrap.dedent(f"""
            import pathlib, time
            pathlib.Path({str(ready)!r}).touch()
            time.sleep(300)
        """)
    )
    mark = f"RUN_{uuid.uuid4().hex}"
    words = torchrun.command([], rendezvous=torchrun.Rendezvous(), nproc_per_node=1, device="cpu", script=None)
    run = start(words, tmp_path / "waiting.py", mark)
    while not ready.exists():
        assert run.poll() is None
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=120)
    assert run.returncode == 128 + signal.SIGTERM
    assert err.splitlines()[-1] == "error: stopped by SIGTERM"
    assert gone(mark) == []
