"""The launcher starts what it was asked for, or says what it lacks (kind 32)."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_loco.launch import __main__, torchrun

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), ROOT / ".ci" / "run"])


@pytest.mark.kind(32)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_stop_at_the_first_fault_and_know_no_localhost(script: Path) -> None:
    lines = [line for line in script.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    assert lines[0] == "set -euo pipefail"
    assert not [line for line in lines if re.search(r"localhost|127\.0\.0\.1|\$\(hostname", line)]


# One write per line: the ranks of a node share a pipe, and torchrun starts them unbuffered.
PRINT_RANK = """
import os
names = "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE".split()
os.write(1, (" ".join(["rank", *(os.environ[name] for name in names)]) + "\\n").encode())
"""


@pytest.mark.kind(32)
def test_two_nodes_meet_and_are_numbered_by_node(tmp_path: Path, free_port: Callable[[], int]) -> None:
    # Both on this machine, each by the command that the launcher would start there, around another program.
    (tmp_path / "print_rank.py").write_text(PRINT_RANK)
    port = str(free_port())
    nodes = []
    for node in (1, 0):  # whoever comes first
        rendezvous = torchrun.Rendezvous.from_environment(
            2, {"NODE_RANK": str(node), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        )
        words = torchrun.command([], rendezvous=rendezvous, nproc_per_node=2, device="cpu", script=None)
        words = [*words[: words.index("megatron_loco.launch.entry") - 1], str(tmp_path / "print_rank.py")]
        nodes.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        outputs = [node.communicate(timeout=120) for node in nodes]
    finally:
        for process in nodes:
            process.kill()
    assert [node.returncode for node in nodes] == [0, 0], outputs[0][1][-3000:] + outputs[1][1][-3000:]
    for node, (out, _) in zip((1, 0), outputs, strict=True):
        seen = sorted(line for line in out.splitlines() if line.startswith("rank "))
        assert seen == [f"rank {2 * node + local} {local} {node} 4 2" for local in (0, 1)]


@pytest.mark.kind(32)
@pytest.mark.parametrize("given", [[], ["NODE_RANK"], ["MASTER_ADDR", "MASTER_PORT"]])
def test_a_node_that_does_not_know_the_others_stops(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As where the tool that should have set them was missing. Slurm's own variables are no substitute.
    started: list[object] = []
    monkeypatch.setattr(torchrun, "run", lambda *arguments: started.append(arguments))
    values = {"NODE_RANK": "0", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
    for name in values:
        monkeypatch.delenv(name, raising=False)
    for name in given:
        monkeypatch.setenv(name, values[name])
    monkeypatch.setenv("SLURM_NNODES", "2")
    assert __main__.main([str(ROOT / "configs" / "llama_quickstart.yaml"), "run.nnodes=2"]) == 2
    _, err = capsys.readouterr()
    assert err.startswith("error: run.nnodes is 2, but the environment lacks ")
    assert all((name in err) == (name not in given) for name in values)
    assert started == []
