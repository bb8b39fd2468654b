"""A Slurm cluster on this machine: its own daemons, ports, key and folders, and nothing of it outlives the tests."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "srun", "scancel", "scontrol", "squeue", "sinfo")
END_STATES = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}
START_TIMEOUT_S = 60
JOB_TIMEOUT_S = 600
POLL_S = 0.2

# Slurm lets several slurmd run on one host if each node has a port. The nodes are called by addresses that every
# machine answers to, so that no host name has to be added anywhere. Plain files stand for GPUs. cgroup/v1 is the plugin
# that does not insist on a mounted cgroup file system, and linuxproc, none and none are those that use no cgroups.
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
KillWait=2
MinJobAge=36000
SlurmdParameters=config_overrides
GresTypes=gpu
FirstJobId={first_job}
NodeName=DEFAULT CPUs=64 RealMemory=4000 Gres=gpu:8
{nodes}
PartitionName=all Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


def why_not() -> str | None:
    """Why no cluster can be started here, or ``None``."""
    if os.geteuid() != 0:
        return "slurmd needs root"
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    missing = [name for name in (*DAEMONS, *COMMANDS, "setpriv") if shutil.which(name, path=path) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)"
    return None


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


class Cluster:
    """Slurm with ``num_nodes`` nodes.

    Args:
        folder: Where everything goes; kept short, as the path of a socket has at most 107 characters.
        num_nodes: Emulated nodes, 127.0.0.1 and following.
    """

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder = folder
        self.num_nodes = num_nodes
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.environment["PATH"] = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def run(
        self, *words: str, check: bool = True, cwd: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> str:
        """The output of a command of Slurm."""
        done = subprocess.run(
            words,
            env={**self.environment, **(variables or {})},
            cwd=cwd or self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert not check or done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, cwd: Path, *words: str, variables: Mapping[str, str] | None = None) -> Job:
        """Submit a job from a folder.

        Args:
            cwd: The folder.
            words: Options of sbatch, script and arguments.
            variables: Added to the environment.

        Returns:
            The job.
        """
        return Job(self, self.run("sbatch", "--parsable", *words, cwd=cwd, variables=variables))

    def _start(self) -> None:
        munge = self.folder / "munge"
        munge.mkdir(parents=True)
        self.folder.chmod(0o755)
        munge.chmod(0o711)
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o400)
        port, *ports = _free_ports(1 + self.num_nodes)
        host = socket.gethostname().split(".")[0]
        nodes = [f"NodeName=127.0.0.{i} NodeHostname={host} Port={p}" for i, p in enumerate(ports, start=1)]
        # A job's rendezvous has its port from the number of the job; another cluster here has other numbers.
        conf = CONF.format(
            host=host, port=port, folder=self.folder, first_job=1000 + os.getpid() % 100000, nodes="\n".join(nodes)
        )
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for index in range(8):
            (self.folder / f"nvidia{index}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/nvidia[0-7]\n")

        paths = [f"--key-file={munge}/key", f"--socket={munge}/socket", f"--pid-file={munge}/pid"]
        self._daemon("munged", "--foreground", "--force", *paths, f"--seed-file={munge}/seed", "--num-threads=2")
        self._wait_until((munge / "socket").exists, "munged")
        self._daemon("slurmctld", "-D", "-c")
        for i in range(1, self.num_nodes + 1):
            self._daemon("slurmd", "-D", "-c", "-N", f"127.0.0.{i}")

        def all_idle() -> bool:
            return (
                len(set(self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", check=False).split())) == self.num_nodes
            )

        self._wait_until(all_idle, "the nodes")

    def _daemon(self, *words: str) -> None:
        with open(self.folder / f"{words[0]}-{len(self._daemons)}.log", "wb") as log:
            # also when pytest is killed
            command = ["setpriv", "--pdeathsig", "KILL", *words]
            process = subprocess.Popen(
                command, env=self.environment, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._daemons.append(process)

    def _wait_until(self, ready: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + START_TIMEOUT_S
        while not ready():
            failed = [process.args for process in self._daemons if process.poll() is not None]
            if failed or time.monotonic() > end:
                logs = {path.name: path.read_text()[-1000:] for path in self.folder.glob("*.log")}
                raise AssertionError(f"{what} did not start; ended: {failed}; {logs}")
            time.sleep(0.05)

    def _stop(self) -> None:
        if len(self._daemons) == 2 + self.num_nodes:
            self.run("scancel", "--user=root", check=False)
            end = time.monotonic() + 30
            while self.run("squeue", "-h", check=False) and time.monotonic() < end:
                time.sleep(POLL_S)
        for process in reversed(self._daemons):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Job:
    """A submitted job, and the states that it was seen in."""

    def __init__(self, cluster: Cluster, number: str) -> None:
        self.cluster = cluster
        self.number = number
        self.states: list[tuple[float, str]] = []
        self._begin = time.monotonic()

    def __str__(self) -> str:
        lines = [f"job {self.number}", *(f"{seconds:6.1f} s  {state}" for seconds, state in self.states)]
        return "\n".join([*lines, self.output()])

    def state(self) -> str:
        """The state now, with ``restart N`` behind it from the first requeue on."""
        text = self.shown()
        found = re.search(r" JobState=(\S+) .* Restarts=(\d+) ", text)
        assert found, text
        name = found[1] if found[2] == "0" else f"{found[1]} restart {found[2]}"
        if not self.states or self.states[-1][1] != name:
            self.states.append((time.monotonic() - self._begin, name))
        return name

    def shown(self) -> str:
        """What ``scontrol show job`` says."""
        return self.cluster.run("scontrol", "--oneliner", "show", "job", self.number)

    def restart_soon(self) -> None:
        """Start a requeued job in a few seconds, for which Slurm waits two minutes.

        At once is too soon: a node refuses a job in the second in which it was told to end that job ("Job credential
        revoked"), and the job fails.
        """
        self.cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now+3")

    def exit_status(self) -> int:
        """The exit status of a job that ended, as Slurm knows it."""
        found = re.search(r" ExitCode=(\d+):0 ", self.shown())
        assert found, self.shown()
        return int(found[1])

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Wait for something that happens while the job has not ended.

        Raises:
            AssertionError: the job ended, or it took too long; with the output of the job.
        """
        end = time.monotonic() + JOB_TIMEOUT_S
        while True:
            state = self.state().split()[0]  # before the look: it may be so just when the job ends
            if ready():
                return
            assert state not in END_STATES, f"{state} before {what}:\n{self.output()}"
            assert time.monotonic() < end, f"no {what} after {JOB_TIMEOUT_S} s:\n{self.output()}"
            time.sleep(POLL_S)

    def wait(self) -> str:
        """Wait for the end of the job and return its last state."""
        self.wait_until(lambda: self.state().split()[0] in END_STATES, "end")
        return self.states[-1][1].split()[0]

    def output(self) -> str:
        """What the job script printed."""
        path = re.search(r" StdOut=(\S.*?) Power=", self.shown())
        assert path, self.shown()
        return Path(path[1]).read_text(errors="replace") if Path(path[1]).exists() else ""
