"""What a configuration needs to run in a Slurm job, and which contradictions are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_loco.launch import slurm

Config = Callable[[str], str]

TWO_NODES = {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}
STOPS = ["training.exit-signal-handler=true", "training.exit-signal=SIGURG"]


def test_nodes_ranks_and_checkpoints(config: Config) -> None:
    file = config("run: {device: cuda}")
    words = ["run.nnodes=2", "run.nproc_per_node=8", 'checkpoint.load="runs/small/checkpoints"', *STOPS]
    assert slurm.job_words(file, [], TWO_NODES) == ("runs/small/checkpoints", words)
    # Said again, nothing is contradicted, so that the resolved.yaml of a job can be submitted.
    assert slurm.job_words(file, words, TWO_NODES) == ("runs/small/checkpoints", words)


@pytest.mark.parametrize(
    ("word", "folder"),
    [
        ("run.name=b", "runs/b/checkpoints"),
        ("run.output_dir=a b", "a b/checkpoints"),
        ("save='12: x#y'", "12: x#y"),
        ("save='7'", "7"),
    ],
)
def test_the_run_continues_from_where_it_saves(config: Config, word: str, folder: str) -> None:
    file = config("run: {device: cuda}")
    save, words = slurm.job_words(file, [word], TWO_NODES)
    assert save == folder
    # The word is read back as the same text, whatever YAML would make of it without quotes.
    assert slurm.job_words(file, [word, *words], TWO_NODES) == (folder, words)


def test_on_cpus_the_configuration_says_how_many_ranks(config: Config) -> None:
    file = config("run: {device: cpu, nproc_per_node: 3}")
    for environment in (TWO_NODES, {"SLURM_JOB_NUM_NODES": "2"}):
        _, words = slurm.job_words(file, [], environment)
        assert words[0] == "run.nnodes=2"
        assert not [word for word in words if "nproc" in word]


def test_a_cluster_that_does_not_count_gpus(config: Config) -> None:
    environment = {"SLURM_JOB_NUM_NODES": "1"}
    with pytest.raises(ValueError, match=r"how many GPUs a node has: --gpus-per-node=N, or run\.nproc_per_node=N"):
        slurm.job_words(config("run: {device: auto}"), [], environment)
    _, words = slurm.job_words(config("run: {device: auto}"), ["run.nproc_per_node=8"], environment)
    assert not [word for word in words if "nproc" in word]


@pytest.mark.kind(32)
@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "run.nnodes=4",
            "run.nnodes: is the number 4, but the job has nodes: 2; sbatch --nodes=4, or leave",
        ),
        (
            "run.nproc_per_node=4",
            "run.nproc_per_node: is the number 4, but the job has GPUs per node: 8; sbatch",
        ),
        (
            "load=elsewhere",
            "load: is the text 'elsewhere', but the job continues from its own checkpoints in",
        ),
        ("save=null", "save: names the folder of the checkpoints that the job continues from, got null"),
        ("finetune=true", "finetune: is true, but the job could not continue from its newest checkpoint; "),
        ("no-load-optim=true", "no-load-optim: is true, but the job could not continue"),
        ("ckpt-step=7", "ckpt-step: is the number 7, but the job could not continue"),
        ("exit-signal=SIGTERM", "exit-signal: is the text 'SIGTERM', but the job needs the text 'SIGURG'"),
        ("exit-signal-handler=false", "exit-signal-handler: is false, but the job needs true"),
    ],
)
def test_what_contradicts_the_job_is_refused(config: Config, word: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        slurm.job_words(config("run: {device: cuda}"), [word], TWO_NODES)
    assert str(error.value).startswith(f"command line: {message}")


def test_the_file_is_named_with_its_line(config: Config) -> None:
    file = config("run:\n  device: cuda\n  nnodes: 3\n")
    with pytest.raises(ValueError) as error:
        slurm.job_words(file, [], TWO_NODES)
    assert str(error.value).startswith(f"{file}:3: run.nnodes: is the number 3")


@pytest.mark.kind(32)
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "SLURM_JOB_NUM_NODES is not set"),
        ({**TWO_NODES, "SLURM_JOB_NUM_NODES": "two"}, "SLURM_JOB_NUM_NODES must be a number from 1, got 'two'"),
        ({**TWO_NODES, "SLURM_GPUS_ON_NODE": "0"}, "SLURM_GPUS_ON_NODE must be a number from 1, got '0'"),
    ],
)
def test_nothing_is_assumed_in_place_of_slurm(config: Config, environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        slurm.job_words(config("run: {device: cuda}"), [], environment)


def test_command_line(config: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TWO_NODES.items():
        monkeypatch.setenv(name, value)
    file = config("run: {device: cuda}")
    assert slurm.main([file, "train-iters=3"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["runs/small/checkpoints", "run.nnodes=2"]
    assert slurm.main([file, "run.nnode=3"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: command line: run.nnode: unknown setting; did you mean nnodes?\n"
