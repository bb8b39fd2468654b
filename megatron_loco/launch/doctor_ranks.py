"""Checks of :mod:`megatron_loco.launch.doctor` that take several ranks: do they meet, are their collectives right."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_loco.collectives.placement import choose_topology, find_nodes
from megatron_loco.collectives.self_check import check_collectives
from megatron_loco.launch.doctor_checks import FAIL, NOT_APPLICABLE, OK, Finding

_NAME = "collectives"
_INIT_METHOD = "MEGATRON_LOCO_DOCTOR_STORE"


def check_given(backend: str, timeout: float) -> list[Finding]:
    """Check on the ranks that a launcher has started; a collective call of all of them.

    Args:
        backend: ``gloo`` or ``nccl``.
        timeout: Seconds to meet and for each collective.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
    name = f"{_NAME} ({backend}, {world_size} ranks)"
    if backend == "nccl":
        if local_rank >= torch.cuda.device_count():
            gpus = torch.cuda.device_count()
            return [Finding(name, FAIL, f"local rank {local_rank} has no GPU ({gpus} here)", "start one rank per GPU")]
        torch.cuda.set_device(local_rank)
    store = os.environ.get(_INIT_METHOD)
    where = "local ranks" if store else f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    meeting = store or "env://"
    try:
        dist.init_process_group(
            backend, init_method=meeting, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
    except Exception as error:  # torch and the back ends raise what they like
        remedy = "same MASTER_ADDR and MASTER_PORT on all nodes? reachable from here (firewall, *_SOCKET_IFNAME)?"
        return [Finding(name, FAIL, f"rank {rank} cannot meet the others at {where}: {_first_line(error)}", remedy)]
    try:
        group = dist.group.WORLD
        assert group is not None
        return check_group(group, name)
    finally:
        dist.destroy_process_group()


def check_group(group: dist.ProcessGroup, name: str) -> list[Finding]:
    """Check the collectives of a group, and where its ranks are; a collective call of all of them."""
    try:
        check_collectives(group, average=True)
        topology = choose_topology(find_nodes(group, 0), "auto")
    except RuntimeError as error:  # also what back ends raise when a peer is gone or silent
        remedy = "--backend gloo tells whether the network or NCCL is at fault; NCCL_DEBUG=INFO says more"
        return [Finding(name, FAIL, f"rank {group.rank()}: {_first_line(error)}", remedy)]
    text = f"{topology.num_nodes} node(s); data parallel over all ranks would be {topology.kind}: {topology.reason}"
    return [
        Finding(name, OK, "all-to-all with unequal pieces, reduce-scatter SUM and AVG are right"),
        Finding("placement", OK, text),
    ]


def check_local(backend: str, nproc: int, num_gpus: int, timeout: float) -> list[Finding]:
    """Start ranks on this machine and check there.

    Args:
        backend: ``gloo`` or ``nccl``.
        nproc: How many.
        num_gpus: GPUs that torch sees.
        timeout: Seconds to meet and for each collective. All of it may take twice that: the ranks import torch first.
    """
    name = f"{_NAME} ({backend}, {nproc} local ranks)"
    if backend == "nccl" and not num_gpus:
        remedy = "use --backend gloo, or look at CUDA_VISIBLE_DEVICES and the driver"
        return [Finding(name, FAIL, "torch sees no GPU", remedy)]
    if backend == "nccl" and nproc > num_gpus:
        return [Finding(name, FAIL, f"{nproc} ranks for {num_gpus} GPUs", f"use --nproc {num_gpus} or less")]
    if nproc == 1:
        return [Finding(name, NOT_APPLICABLE, "one rank reduces nothing; use --nproc 2 or more")]
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        try:
            for rank in range(nproc):
                with open(Path(folder, f"rank{rank}"), "wb") as log:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, "-m", "megatron_loco.launch.doctor_ranks", backend, str(timeout)],
                            env={**os.environ, **_environment(rank, nproc, Path(folder, "store"))},
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                        )
                    )
            codes = _wait(processes, 2 * timeout)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        logs = [Path(folder, f"rank{rank}").read_text(errors="replace").strip() for rank in range(nproc)]
    failed = [rank for rank, code in enumerate(codes) if code != 0]
    if not failed:
        return [Finding(name, OK, logs[0].splitlines()[-1])]
    # Of several, the one that ended by itself knows the cause; a silent one was waiting for it.
    told = next((rank for rank in failed if codes[rank] is not None and logs[rank]), failed[0])
    what = logs[told].splitlines()[-1] if logs[told] else "no answer"
    silent = [rank for rank in failed if codes[rank] is None]
    if silent:
        what += f"; no answer within {2 * timeout:.0f} s from ranks {silent}"
    remedy = "see above for the interface; GLOO_SOCKET_IFNAME=lo tries the loopback"
    if backend == "nccl":
        remedy = "try --backend gloo to tell NCCL from the network; NCCL_DEBUG=INFO says more"
    return [Finding(name, FAIL, f"rank {told}: {what}", remedy)]


def _environment(rank: int, nproc: int, store: Path) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "",
        "MASTER_PORT": "",
        _INIT_METHOD: f"file://{store}",
        "OMP_NUM_THREADS": "1",
    }


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[int | None]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.05)
    return [process.poll() for process in processes]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _rank_main(backend: str, timeout: str) -> int:
    torch.set_num_threads(1)
    findings = check_given(backend, float(timeout))
    print("; ".join(finding.text for finding in findings), flush=True)
    return int(any(finding.status == FAIL for finding in findings))


if __name__ == "__main__":
    sys.exit(_rank_main(*sys.argv[1:]))
