"""Every shipped configuration and every command of the README starts (kind 25), and measures what it says (kind 40).

Training commands go through the launcher in this process; the ranks are forked as in
``tests/integrations/megatron/_training.py`` and train two steps.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megatron_loco import cpu, patch
from megatron_loco.bench import step_share, wire
from megatron_loco.launch import __main__, report, torchrun
from megatron_loco.launch.report import BITS, Run
from tests.integrations.megatron import _training

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONFIGS = [Path("configs/llama_quickstart.yaml")]
"""All others: tests/configs."""
SHORTER = (
    *("train-iters=2", "lr-warmup-iters=1", "eval-iters=1", "log-interval=1"),
    *("seq-length=64", "max-position-embeddings=64", "micro-batch-size=2", "global-batch-size=4"),
)
"""Overrides for two steps of little work; what they leave alone is what is tested."""

STARTS = "bash scripts/pretrain_gpt.sh "
ENTRIES = ("megatron_loco.launch.entry", "megatron_loco.bench.step_share")


def readme_commands() -> list[str]:
    """Commands in the README: lines of its shell blocks, and what stands behind a ``$`` in its other blocks."""
    commands = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE):
        lines = block.splitlines()
        if language in ("bash", "sh", "shell"):
            commands += lines
        elif language != "python":
            commands += [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    commands += re.findall(r"`((?:python -m |bash |torchrun |pip )[^`]+)`", README)
    return list(dict.fromkeys(shlex.join(words) for line in commands if (words := shlex.split(line, comments=True))))


ELSEWHERE = {
    "bash scripts/run_tests.sh": "this run; with stubs in tests/test_bootstrap.py",
    "pip install -e .": "scripts/bootstrap.sh does, for every run",
    "torchrun ... pretrain_gpt.py ...": "tests/integrations/megatron/test_training.py, the import-line script",
    "torchrun ... -m megatron_loco.launch.entry": "the command with a Megatron checkout, below",
    "pip install 'megatron-loco[plot]'": "the lock, which has that extra; without it: tests/launch/test_report.py",
    "megatron-loco patch": "tests/releases/test_patch_tree.py",
    "megatron-loco plan": "tests/launch/test_plan.py",
    "python -m megatron_loco.bench.hooks": "tests/bench/test_hooks.py",
    "sbatch": "tests/slurm",
    "CONTAINER_IMAGE=image.sqsh sbatch": "tests/slurm/test_job_scripts.py",
    "scancel": "tests/slurm/test_jobs.py",
    "torchrun --nproc-per-node 2 scripts/examples/": "tests/test_examples.py",
    "megatron-loco doctor": "tests/launch/test_doctor.py",
    "megatron-loco train": "tests/launch/test_cli.py, and the launcher below",
    "python -m megatron_loco.bench.exchange": "tests/bench/test_exchange.py",
    "python -m megatron_loco.bench.kernels": "tests/bench/test_kernels.py",
    "python -m megatron_loco.kernels.triton_aot": "tests/kernels/test_triton_aot.py",
}
"""Commands that are started by other tests, by how they begin."""

COMMANDS = [command for command in readme_commands() if not command.startswith(tuple(ELSEWHERE))]
TRAINING = [command for command in COMMANDS if STARTS in command]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the corpora are prepared, once."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The launcher's torchrun commands, each run to its end by forked ranks."""
    commands: list[list[str]] = []

    def run(words: Sequence[str], environment: Mapping[str, str]) -> int:
        commands.append(list(words))
        entry = next(index for index, word in enumerate(words) if word in ENTRIES)
        (per_node,) = (int(w.partition("=")[2]) for w in words if w.startswith("--nproc-per-node="))
        with pytest.MonkeyPatch.context() as patching:
            for name in {*os.environ} - {*environment}:
                patching.delenv(name)
            for name, value in environment.items():
                patching.setenv(name, value)
            done = _training._launch_by_fork(words[entry], list(words[entry + 1 :]), per_node)
        assert done.returncode == 0, done.stdout[-6000:]
        return 0

    monkeypatch.setattr(torchrun, "run", run)
    monkeypatch.chdir(ROOT)
    for name in ("DRY_RUN", "MEGATRON_LM_DIR"):
        monkeypatch.delenv(name, raising=False)
    return commands


def start(arguments: Sequence[str], folder: Path, data: Path) -> Run:
    """Train two steps by the launcher; what was logged."""
    overrides = (*SHORTER, "run.device=cpu", f"run.data_dir={data}", f"run.output_dir={folder}")
    assert __main__.main([*arguments, *overrides]) == 0
    run = Run.read(folder)
    assert set(run.scalars["lm loss"]) == {1, 2}
    for tag in ("lm loss", "grad-norm"):
        # A gradient of 0 would be a model that does not learn.
        assert all(0 < value < math.inf for value in run.scalars[tag].values()), run.scalars[tag]
    return run


@pytest.mark.kind(25, 26)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_every_configuration_trains(config: Path, ranks: list[list[str]], data: Path, tmp_path: Path) -> None:
    run = start([str(config), "loco.warmup_steps=0"], tmp_path / "run", data)
    assert all(4 < bits < 5 for bits in run.scalars[BITS].values())
    written = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"resolved.yaml", "command.txt", "tensorboard"} <= written
    # The same without LoCo, from the file that the first run left behind.
    off = start([str(tmp_path / "run" / "resolved.yaml"), "loco.bits=off"], tmp_path / "off", data)
    assert BITS not in off.scalars
    assert off.scalars["lm loss"][1] == run.scalars["lm loss"][1]
    assert report.main([str(tmp_path / "run"), str(tmp_path / "off")]) == 0
    assert len(ranks) == 2


@pytest.mark.kind(25)
def test_every_command_of_the_readme_is_known() -> None:
    assert len(TRAINING) >= 3
    measurements = [f"python -m megatron_loco.bench.{name}" for name in ("wire", "topology", "step_share")]
    known = (STARTS, *measurements, "python -m megatron_loco.launch.report")
    unknown = [command for command in COMMANDS if not any(part in command for part in known)]
    assert not unknown, "start them here, or say in ELSEWHERE who does"


@pytest.mark.kind(25)
@pytest.mark.parametrize("command", TRAINING)
def test_training_commands_of_the_readme(
    command: str, ranks: list[list[str]], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(command)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        if name == "MEGATRON_LM_DIR":
            # A checkout whose training script is ours.
            value = str(tmp_path / "Megatron-LM")
            (tmp_path / "Megatron-LM").mkdir()
            script = "from megatron_loco.launch.pretrain_gpt import main\nif __name__ == '__main__':\n    main()\n"
            (tmp_path / "Megatron-LM" / "pretrain_gpt.py").write_text(script)
        monkeypatch.setenv(name, value)
    program, script, *arguments = words
    assert (program, (ROOT / script).is_file()) == ("bash", True)
    arguments = ["configs/llama_quickstart.yaml" if word == "CONFIG.yaml" else word for word in arguments]
    if "DRY_RUN" in os.environ:
        assert __main__.main([*arguments, f"run.data_dir={data}"]) == 0
        assert ranks == []
        return
    start(arguments, tmp_path / "run", data)
    assert len(ranks) == 1
    assert ("--script" in ranks[0]) == ("MEGATRON_LM_DIR" in os.environ)


@pytest.mark.kind(25)
def test_python_of_the_readme() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        names = {"__name__": "readme"}
        if "fsdp2" in block or "ddp" in block:
            with one_rank():
                ddp_model = DistributedDataParallel(nn.Linear(8, 8))
                exec(compile(block, "README.md", "exec"), names | {"model": sharded(), "ddp_model": ddp_model})
            continue
        with cpu.enter():
            exec(compile(block, "README.md", "exec"), names)
            with patch():  # the handle that the block let go of
                pass


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded() -> nn.Module:
    """A model under FSDP2."""
    return fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (1,)))


# ------------------------------------------------------------------------------------- measurements (kind 40)


@pytest.mark.kind(25, 40)
def test_share_of_a_step(
    ranks: list[list[str]], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = (*SHORTER, "run.device=cpu", f"run.data_dir={data}", f"run.output_dir={tmp_path / 'run'}")
    options = ("train-iters=4", "loco.warmup_steps=1", "--json", str(tmp_path / "share.json"))
    assert step_share.main(["configs/llama_quickstart.yaml", *overrides, *options]) == 0
    result = json.loads((tmp_path / "share.json").read_text())
    # Of the three compressed steps the first does not count.
    assert (result["ranks"], result["steps"]) == (2, 2 * 2)
    assert 0 < result["encode_seconds"] + result["decode_seconds"] < result["total_seconds"]
    assert 0 < result["share"] < 1
    assert "share of the step" in " ".join(capsys.readouterr().out.split())
    # A run without a compressed step has no share.
    options = ("loco.warmup_steps=9", f"run.output_dir={tmp_path / 'warm'}")
    assert step_share.main(["configs/llama_quickstart.yaml", *overrides, *options]) == 1
    assert "error: no step was compressed" in capsys.readouterr().err


@pytest.mark.kind(40)
@pytest.mark.parametrize("ranks_option", [["--ranks", "1"], ["--ranks", "0"]])
def test_a_measurement_of_one_rank_is_refused(ranks_option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert wire.main(ranks_option) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "--ranks must be at least 2" in err


# A smaller layer, by forked ranks: spawned ones would import the sizes anew.
MEASURE = """
import multiprocessing, sys
from megatron_loco.bench import step_share, wire
wire.HIDDEN, wire.FFN, wire.KV_HIDDEN = 512, 1408, 128
forked = multiprocessing.get_context("fork")
wire.multiprocessing.get_context = lambda method: forked
sys.exit(wire.main(sys.argv[1:]))
"""


@pytest.mark.kind(40, 17, 25)
@pytest.mark.skipif(sys.platform != "linux", reason="the measurement reads Linux's counters")
def test_bytes_on_the_wire_of_three_ranks() -> None:
    command = [sys.executable, "-c", MEASURE, "--ranks", "3", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    measured = json.loads(done.stdout)
    flat = measured["schemes"]["flat"]
    assert measured["ranks"] == 3
    # Per element that leaves the rank: 4 bits and 32 / 256 of scale; a few exact ones of 32 bits, and padding.
    leaving = measured["numel"] * 2 / 3
    assert 4.125 <= 8 * flat["formula_bytes"] / leaving < 4.15
    assert measured["ring_fp32_bytes"] == 4 * leaving
    if measured["private_network"]:  # else others' traffic is in the count, and the output says so
        # Headers and acknowledgements.
        assert 1 <= flat["counted_bytes"] / flat["formula_bytes"] < 1.02
