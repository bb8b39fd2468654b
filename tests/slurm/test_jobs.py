"""The job scripts in a real Slurm on this machine: time's up, checkpoint, requeue, resume; and failures."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_loco.launch.report_runs import Run
from tests.integrations.megatron import _training
from tests.slurm._checkout import make_checkout
from tests.slurm._cluster import Cluster, Job

CONFIG = "configs/llama_quickstart.yaml"
ITERATIONS = 100
TINY = [
    *("run.name=tiny", "run.nproc_per_node=1", "run.corpus=null", "mock-data=true", "env.OMP_NUM_THREADS=1"),
    *("tokenizer-type=NullTokenizer", "vocab-size=255", "num-layers=2", "hidden-size=64", "ffn-hidden-size=128"),
    *("seq-length=64", "max-position-embeddings=64", "micro-batch-size=2", "global-batch-size=8"),
    *(f"train-iters={ITERATIONS}", "lr-warmup-iters=2", "eval-iters=1", "eval-interval=1000", "log-interval=1"),
    *("log-params-norm=true", "loco.warmup_steps=2", "loco.min_bucket_numel=0", "save-interval=10"),
]
CHECKPOINTS = Path("runs", "tiny", "checkpoints")

STAND_IN = """#!{bash}
# In place of Python: a training that saves and ends at SIGURG, and is complete if it has a checkpoint.
case "$*" in "-m megatron_loco.launch.slurm "*) exec {python} "$@" ;; esac
folder=runs/llama_quickstart/checkpoints
[[ ! -e $folder ]] || exit 0
trap 'mkdir -p "$folder"; echo 1 > "$folder/latest_checkpointed_iteration.txt"; exit 0' URG
touch started
while :; do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Makes a checkout in which nothing is trained."""

    def make() -> Path:
        checkout = make_checkout(tmp_path_factory.mktemp("stand_in"))
        python = checkout / "python"
        python.write_text(STAND_IN.format(bash=shutil.which("bash"), python=shlex.quote(sys.executable)))
        python.chmod(0o755)
        (checkout / "scripts" / "bootstrap.sh").write_text(f"echo {shlex.quote(str(python))}\n")
        return checkout

    return make


@pytest.fixture(scope="module", autouse=True)
def limited(cluster: Cluster, stand_in: Callable[[], Path]) -> Job:
    """A job that reaches its time limit, submitted before the tests: Slurm looks at limits twice a minute."""
    # Notice of it may come at once, as Slurm gives it up to a minute early.
    options = ["--time=1", "--signal=B:USR1@50", "--nodelist=127.0.0.1"]
    return cluster.submit(stand_in(), *options, "scripts/slurm/single_node.sbatch", CONFIG)


def _newest(checkout: Path) -> int:
    tracker = checkout / CHECKPOINTS / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text() or 0) if tracker.exists() else 0


def _node_log(checkout: Path, job: Job, node: int) -> str:
    return (checkout / "runs" / "slurm" / f"loco-{job.number}-node{node}.log").read_text(errors="replace")


def _without(words: list[str], *flags: str) -> list[str]:
    """Without flags that have one value."""
    gone = {index for flag in flags for index in (words.index(flag), words.index(flag) + 1)}
    return [word for index, word in enumerate(words) if index not in gone]


def _goes_on_after_requeue(job: Job) -> None:
    restarted = [f"{state} restart 1" for state in ("PENDING", "RUNNING", "COMPLETED")]
    job.wait_until(lambda: job.state() in restarted, "requeue")
    if job.state() == restarted[0]:
        job.restart_soon()


def _assert_goes_on(job: Job) -> None:
    _goes_on_after_requeue(job)
    assert job.wait() == "COMPLETED", job.output()
    print(job)
    assert "restart 0: the time is up" in job.output()
    assert job.output().endswith("restart 1: complete\n")


@pytest.mark.kind(27, 32)
def test_a_run_that_is_stopped_and_requeued_is_bitwise_the_run_that_is_not(
    cluster: Cluster, checkout: Path, tmp_path: Path
) -> None:
    job = cluster.submit(checkout, "scripts/slurm/multi_node.sbatch", CONFIG, *TINY)
    # After a save, as Megatron then has a process that must survive the notice.
    job.wait_until(lambda: _newest(checkout) >= 10, "checkpoint")
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    _goes_on_after_requeue(job)
    stopped = _newest(checkout)
    assert 10 <= stopped < ITERATIONS, "the run was over before it could be stopped"
    assert job.wait() == "COMPLETED", job.output()

    print(job)
    assert f"restart 0: stopped at iteration {stopped}; requeued" in job.output()
    assert f"restart 1: from iteration {stopped}, " in job.output()
    assert job.output().endswith("restart 1: complete\n")
    assert f"error state of the checkpoint, at step {stopped}" in _node_log(checkout, job, 0)
    assert (checkout / "bootstraps").read_text() == "\n\n"  # by the first node, at each start

    run = Run.read(checkout / "runs" / "tiny")
    assert run.restarts == ()  # no iteration ran twice
    words = shlex.split((checkout / "runs" / "tiny" / "command.txt").read_text())
    flags = _without(
        words[words.index("--") + 1 :],
        *("--tensorboard-dir", "--save", "--load", "--save-interval", "--exit-signal"),
    )
    uninterrupted = _training.train(tmp_path / "uninterrupted", *flags, num_ranks=2, iterations=ITERATIONS)
    assert _training.differences(run, uninterrupted) == []


def test_a_rank_that_is_killed_fails_the_job_with_the_status_of_the_training(cluster: Cluster, checkout: Path) -> None:
    job = cluster.submit(checkout, "scripts/slurm/single_node.sbatch", CONFIG, *TINY, f"save={checkout}/saved")

    def ranks() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if words[1:4] == ["-u", "-m", "megatron_loco.launch.entry"] and f"{checkout}/saved" in words:
                found.append(process)
        return found

    job.wait_until(lambda: bool(ranks()), "rank")
    for process in ranks():
        process.kill()
    assert job.wait() == "FAILED", job.output()
    assert job.exit_status() != 0
    assert f"the training failed with status {job.exit_status()} " in job.output()
    assert "SIGKILL" in job.output()
    assert "Restarts=0 " in job.shown()


def test_a_mistake_in_the_configuration_fails_the_job_before_it_starts(cluster: Cluster, checkout: Path) -> None:
    job = cluster.submit(checkout, "scripts/slurm/multi_node.sbatch", CONFIG, "run.nnodes=3")
    assert job.wait() == "FAILED"
    assert job.exit_status() == 2
    assert job.output().startswith("error: command line: run.nnodes: is the number 3, but the job has nodes: 2; sbatch")
    assert "Restarts=0 " in job.shown()


def test_a_job_that_is_preempted_goes_on_later(cluster: Cluster, stand_in: Callable[[], Path]) -> None:
    checkout = stand_in()
    node = ["--nodelist=127.0.0.2", "--exclusive"]  # the first has the job that must not be preempted
    job = cluster.submit(checkout, *node, "scripts/slurm/single_node.sbatch", CONFIG)
    job.wait_until((checkout / "started").exists, "training")
    assert "the time is up" not in job.output()
    urgent = cluster.submit(checkout, *node, "--partition=urgent", "--output=/dev/null", "--wrap", "true")
    assert urgent.wait() == "COMPLETED"
    _assert_goes_on(job)


def test_a_job_at_its_time_limit_goes_on_later(limited: Job) -> None:
    _assert_goes_on(limited)


@pytest.mark.parametrize("script", ["single_node", "multi_node", "container"])
def test_the_options_in_the_scripts_are_valid(cluster: Cluster, checkout: Path, script: str) -> None:
    cluster.run("sbatch", "--test-only", f"scripts/slurm/{script}.sbatch", CONFIG, cwd=checkout)
