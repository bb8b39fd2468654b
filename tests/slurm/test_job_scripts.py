"""The job scripts with stand-ins for Slurm's commands: what is passed on, what is refused, how the job ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts" / "slurm"
SCRIPTS = sorted(FOLDER.glob("*.sbatch"))
CONFIG = "configs/llama_quickstart.yaml"
TRACKER = "runs/llama_quickstart/checkpoints/latest_checkpointed_iteration.txt"

SRUN = """
printf '%s\\n' "$@" > "$STUBS/srun.$(ls "$STUBS" | grep -c '^srun\\.')"
printf '%s\\n' "$MASTER_ADDR $MASTER_PORT $SRUN_CPUS_PER_TASK" > "$STUBS/variables"
while [[ $1 == --* ]]; do shift; done
[[ $1 == bash ]] || exec "$@"
source "$STUBS/training"
"""
SCONTROL = """
case $1 in
  show) [[ "$*" == 'show hostnames n[7-8]' ]] && printf 'n7\\nn8\\n' ;;
  requeue) echo "requeue $2" >> "$STUBS/requeues" ;;
esac
"""
SCANCEL = 'printf "%s\\n" "$*" >> "$STUBS/notices"\n'
NOTICE = """
kill -USR1 "$PPID"
until [[ -s $STUBS/notices ]]; do sleep 0.02; done
"""
"""For SRUN: Slurm tells the script that its time is up, and the script tells the training."""


SAVE = f'mkdir -p "$(dirname {TRACKER})"; > {TRACKER} echo'
"""For SRUN, before a number: the training saves a checkpoint of that iteration."""


class Job:
    """A job on two nodes, n7 and n8, as Slurm would start its script: from a copy elsewhere."""

    def __init__(self, checkout: Path, stubs: Path) -> None:
        self.checkout = checkout
        self.stubs = stubs
        self.stubs.mkdir()
        self.environment = {
            "PATH": f"{stubs}:{os.environ['PATH']}",
            "STUBS": str(stubs),
            "SLURM_SUBMIT_DIR": str(checkout),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NAME": "my job",
            "SLURM_JOB_NODELIST": "n[7-8]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_CPUS_ON_NODE": "64",
        }
        for name, action in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL)):
            self.command(name, action)
        self.train("exit 0")

    def command(self, name: str, action: str) -> None:
        (self.stubs / name).write_text(f"#!{shutil.which('bash')}\n{action}")
        (self.stubs / name).chmod(0o755)

    def train(self, action: str) -> None:
        """What stands for the training on all nodes."""
        (self.stubs / "training").write_text(action)

    def saved(self, iteration: int) -> None:
        path = self.checkout / TRACKER
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{iteration}\n")

    def run(self, script: str, *arguments: str, **variables: str | None) -> subprocess.CompletedProcess[str]:
        copy = self.stubs / "slurm_script"
        shutil.copy(FOLDER / f"{script}.sbatch", copy)
        environment = {**self.environment, **variables}
        return subprocess.run(
            ["bash", str(copy), *arguments],
            env={name: value for name, value in environment.items() if value is not None},
            cwd=self.checkout,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            start_new_session=True,
        )

    def sruns(self) -> list[list[str]]:
        """The words of each call of srun."""
        return [path.read_text().splitlines() for path in sorted(self.stubs.glob("srun.*"))]

    def requeues(self) -> int:
        path = self.stubs / "requeues"
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def job(checkout: Path, tmp_path: Path) -> Job:
    return Job(checkout, tmp_path / "stubs")


@pytest.mark.kind(32)
def test_one_launcher_per_node_with_everything_it_was_given(job: Job) -> None:
    done = job.run("multi_node", CONFIG, "run.name=two words", "env.X=a*", SLURM_CPUS_PER_TASK="32")
    assert done.returncode == 0, done.stderr
    (words,) = job.sruns()
    begin = words.index("bash")
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--export=ALL", "--kill-on-bad-exit=1"} < set(
        words[:begin]
    )
    assert f"--output={job.checkout}/runs/slurm/my job-4711-node%n.log" in words[:begin]
    assert words[begin + 1 : begin + 3] == ["-c", 'NODE_RANK=$SLURM_NODEID exec "$@"']
    assert words[begin + 4 :] == [
        *(sys.executable, "-m", "megatron_loco.launch", CONFIG, "run.name=two words", "env.X=a*", "run.nnodes=2"),
        'checkpoint.load="runs/two words/checkpoints"',
        *("training.exit-signal-handler=true", "training.exit-signal=SIGURG"),
    ]
    assert (job.stubs / "variables").read_text() == "n7 24711 32\n"
    assert (job.checkout / "bootstraps").read_text() == "\n"
    assert job.requeues() == 0


def test_a_node_is_used_whole_where_cpus_per_task_is_not_given(job: Job) -> None:
    assert job.run("multi_node", CONFIG).returncode == 0
    assert (job.stubs / "variables").read_text() == "n7 24711 64\n"


@pytest.mark.kind(32)
@pytest.mark.parametrize("scontrol", ["exit 127\n", "exit 1\n", "exit 0\n"], ids=["missing", "fails", "names nobody"])
def test_nodes_that_cannot_meet_do_not_start(job: Job, scontrol: str) -> None:
    job.command("scontrol", scontrol)
    done = job.run("multi_node", CONFIG, MASTER_ADDR="left-over", MASTER_PORT="1")
    assert done.returncode == 2
    assert "error: scontrol" in done.stderr
    assert job.sruns() == []


@pytest.mark.kind(32)
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURM_JOB_ID": None}, "error: SLURM_JOB_ID is not set: this script is for sbatch"),
        ({"SLURM_JOB_NODELIST": None}, "error: SLURM_JOB_NODELIST is not set"),
        ({"SLURM_JOB_NUM_NODES": ""}, "error: SLURM_JOB_NUM_NODES is not set"),
        (
            {"SLURM_SUBMIT_DIR": "/"},
            "error: / is not a checkout of megatron_loco: submit the job in it, or set LOCO_DIR",
        ),
        ({"LOCO_DIR": "/no such folder"}, "error: /no such folder is not a checkout of megatron_loco"),
    ],
)
def test_what_slurm_sets_is_not_guessed(job: Job, variables: dict[str, str | None], message: str) -> None:
    done = job.run("multi_node", CONFIG, **variables)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert job.sruns() == []


def test_the_checkout_may_be_elsewhere(job: Job, tmp_path: Path) -> None:
    done = job.run("single_node", f"{job.checkout}/{CONFIG}", SLURM_SUBMIT_DIR=str(tmp_path), LOCO_DIR=".")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: usage: sbatch [OPTION...] SCRIPT CONFIG [KEY=VALUE...]\n"),
        ([CONFIG, "run.nnodes=3"], "error: command line: run.nnodes: is the number 3, but the job has nodes: 2"),
        (["no.yaml"], "error: no.yaml: no such file\n"),
    ],
)
def test_mistakes_are_told_once_before_anything_starts(
    job: Job, script: Path, arguments: list[str], message: str
) -> None:
    done = job.run(script.stem, *arguments, CONTAINER_IMAGE="image", CONTAINER_PYTHON=sys.executable)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("error: ") == 1
    assert not [words for words in job.sruns() if "megatron_loco.launch" in words]


@pytest.mark.kind(32)
@pytest.mark.parametrize("in_checkout", [True, False])
def test_container(job: Job, tmp_path: Path, in_checkout: bool) -> None:
    checkout = job.checkout
    job.environment["LOCO_DIR"] = str(checkout)
    if not in_checkout:
        job.checkout = tmp_path / "elsewhere"
        job.checkout.mkdir()
    done = job.run(
        "container",
        f"{checkout}/{CONFIG}",
        CONTAINER_IMAGE="reg#team/image:1",
        CONTAINER_MOUNTS="/my data:/data",
        CONTAINER_PYTHON=sys.executable,
    )
    assert done.returncode == 0, done.stderr
    plan, training = job.sruns()
    folders = [checkout] if in_checkout else [checkout, job.checkout]
    flags = [
        "--container-image=reg#team/image:1",
        f"--container-mounts={','.join(f'{folder}:{folder}' for folder in folders)},/my data:/data",
        f"--container-workdir={job.checkout}",
        "--no-container-mount-home",
    ]
    assert plan[: plan.index(sys.executable)] == ["--nodes=1", "--ntasks=1", *flags]
    assert training[training.index("bash") - len(flags) : training.index("bash")] == flags
    assert not (checkout / "bootstraps").exists()


@pytest.mark.kind(32)
def test_a_container_without_an_image_is_refused(job: Job) -> None:
    done = job.run("container", CONFIG)
    assert done.returncode == 2
    assert done.stderr == "error: CONTAINER_IMAGE is not set: a .sqsh file, or registry#name:tag\n"
    assert job.sruns() == []


@pytest.mark.parametrize("error", ["", "error: rank 9 ran out of memory\n"])
def test_status_of_the_training_is_that_of_the_job(job: Job, error: str) -> None:
    logs = job.checkout / "runs" / "slurm"
    logs.mkdir(parents=True)
    (logs / "my job-4711-node0.log").write_text("the first node's last line\n")
    (logs / "my job-4711-node1.log").write_text(f"...\n{error}...\n")
    job.train("exit 17")
    done = job.run("multi_node", CONFIG)
    assert done.returncode == 17
    assert "the training failed with status 17" in done.stdout
    assert done.stdout.endswith(error or "the first node's last line\n")
    assert job.requeues() == 0


@pytest.mark.parametrize(
    ("before", "after", "training", "status", "requeues", "message"),
    [
        (None, 3, 0, 0, 1, "stopped at iteration 3; requeued"),
        (3, 12, 0, 0, 1, "stopped at iteration 12; requeued"),
        (None, None, 0, 1, 0, "stopped, but without a checkpoint newer than iteration 0; not requeued"),
        (3, 3, 0, 1, 0, "stopped, but without a checkpoint newer than iteration 3; not requeued"),
        (12, 3, 0, 1, 0, "stopped, but without a checkpoint newer than iteration 12; not requeued"),
        (3, 4, 9, 9, 0, "the training failed with status 9 at a newest checkpoint of iteration 4; not requeued"),
    ],
)
def test_only_a_run_that_stopped_and_went_on_is_requeued(
    job: Job, before: int | None, after: int | None, training: int, status: int, requeues: int, message: str
) -> None:
    if before is not None:
        job.saved(before)
    save = "" if after is None else f"{SAVE} {after}"
    job.train(f"{NOTICE}\n{save}\nexit {training}")
    done = job.run("multi_node", CONFIG, SLURM_RESTART_COUNT="2")
    assert done.returncode == status, done.stderr
    assert f"job 4711, restart 2: from iteration {before or 0}, " in done.stdout
    assert message in done.stdout
    assert job.requeues() == requeues
    # To the steps of the job, whose processes ignore this signal if they do not save at it.
    assert set((job.stubs / "notices").read_text().splitlines()) == {"--quiet --signal=URG 4711"}


def test_a_requeue_that_slurm_refuses_is_a_failure(job: Job) -> None:
    job.command("scontrol", f"[[ $1 != requeue ]] || exit 1\n{SCONTROL}")
    job.train(f"{NOTICE}\n{SAVE} 3")
    done = job.run("multi_node", CONFIG)
    assert done.returncode == 2
    assert "error: Slurm refuses to requeue the job; the same sbatch command continues the run" in done.stderr


def test_a_notice_before_the_training_is_not_lost(job: Job) -> None:
    (job.checkout / "scripts" / "bootstrap.sh").write_text(f"kill -USR1 $PPID\necho '{sys.executable}'\n")
    job.train(
        f'until [[ -s $STUBS/notices ]]; do sleep 0.02; done; mkdir -p "$(dirname {TRACKER})"; echo 1 > {TRACKER}'
    )
    done = job.run("multi_node", CONFIG)
    assert done.returncode == 0, done.stderr
    assert job.requeues() == 1


@pytest.mark.kind(32)
@pytest.mark.parametrize("script", [*SCRIPTS, FOLDER / "job.sh"], ids=lambda path: path.name)
def test_script_parses_and_knows_no_localhost(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    code = [line for line in script.read_text().splitlines() if not line.startswith("#")]
    assert not [line for line in code if "localhost" in line or "127.0.0.1" in line or "$(hostname" in line]
    if script.suffix == ".sbatch":
        assert code[0] == "set -euo pipefail"
        assert os.access(script, os.X_OK)


@pytest.mark.kind(32)
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck() -> None:
    subprocess.run(["shellcheck", "-x", *map(str, [*SCRIPTS, FOLDER / "job.sh"])], check=True, cwd=ROOT)
