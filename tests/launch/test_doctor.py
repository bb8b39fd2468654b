"""``megatron-loco doctor``: a healthy machine passes, and each fault is found and comes with what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_loco.launch import doctor, doctor_checks, doctor_ranks
from megatron_loco.launch.doctor_checks import FAIL, NOT_APPLICABLE, OK, WARN, Finding
from tests._ranks import run_ranks

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


def found(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_this_machine_with_two_local_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--nproc", "2", "--backend", "gloo"]) == 0
    text = capsys.readouterr().out
    for line in ("ok    torch: ", "ok    megatron-core: ", "n/a   GPUs: not applicable", "ok    kernels for cpu: "):
        assert line in text
    assert "ok    collectives (gloo, 2 local ranks): all-to-all with unequal pieces" in text


def test_ranks_that_cannot_meet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    monkeypatch.setattr(doctor_checks, "CHECKS", (doctor_checks.check_interfaces,))
    assert doctor.main(["--nproc", "2", "--backend", "gloo"]) == 1
    text = capsys.readouterr().out
    assert "FAIL  GLOO_SOCKET_IFNAME: nowhere0: no such interface here" in text
    assert "FAIL  collectives (gloo, 2 local ranks): rank 0: rank 0 cannot meet the others" in text
    assert text.endswith("2 failed, 0 warning(s)\n")


def shifted(rank: int, world_size: int) -> list[Finding]:
    original = dist.all_to_all_single

    def shift(output: Any, *args: Any, **kwargs: Any) -> None:
        original(output, *args, **kwargs)
        if rank == 1:
            output += 1

    dist.all_to_all_single = shift
    group = dist.group.WORLD
    assert group is not None
    return doctor_ranks.check_group(group, "collectives")


def test_a_wrong_all_to_all_is_found_on_every_rank() -> None:
    for (finding,) in run_ranks(shifted, 2):
        assert finding.status == FAIL
        assert "return wrong results on ranks [1]" in finding.text
        assert finding.remedy


def given(rank: int, world_size: int) -> list[Finding]:
    group = dist.group.WORLD
    assert group is not None
    return doctor_ranks.check_group(group, "collectives")


def test_given_ranks() -> None:
    for findings in run_ranks(given, 3):
        assert [finding.status for finding in findings] == [OK, OK]
        assert findings[1].text.startswith("1 node(s); data parallel over all ranks would be flat")


def test_nccl_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = doctor_ranks.check_local("nccl", 2, 0, 1.0)
    assert (finding.status, "--backend gloo" in finding.remedy) == (FAIL, True)
    (finding,) = doctor_ranks.check_local("nccl", 4, 2, 1.0)
    assert (finding.status, finding.remedy) == (FAIL, "use --nproc 2 or less")
    (finding,) = doctor_ranks.check_local("gloo", 1, 0, 1.0)
    assert finding.status == NOT_APPLICABLE


def test_supported_versions_are_those_of_setup_py() -> None:
    text = (Path(__file__).parents[2] / "setup.py").read_text()
    declared = dict(re.findall(r'^ +"(torch|megatron-core)([^"]+)",', text, re.MULTILINE))
    assert declared == doctor_checks._REQUIREMENTS


@pytest.mark.parametrize(
    ("torch_version", "status"), [("2.9.0+cu130", OK), ("2.14.9", OK), ("2.15.0", FAIL), ("2.8.0", FAIL), (None, FAIL)]
)
def test_versions(torch_version: str | None, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(package: str) -> str:
        if package == "torch" and torch_version is None:
            raise PackageNotFoundError
        return (torch_version or "") if package == "torch" else "0.19.1"

    monkeypatch.setattr(doctor_checks, "requirements", lambda: doctor_checks._REQUIREMENTS)
    monkeypatch.setattr(doctor_checks, "_installed", installed)
    findings = found(doctor_checks.check_versions())
    assert findings["torch"].status == status
    assert findings["megatron-core"].status == OK
    assert findings["torch"].remedy == ("" if status == OK else "pip install 'torch>=2.9,<2.15'")


@pytest.mark.parametrize(
    ("there", "variable", "status", "said"),
    [
        ({"eth0": "10.0.0.1"}, None, OK, "only candidate is eth0"),
        ({"eth0": "10.0.0.1", "ib0": "10.1.0.1"}, None, WARN, "eth0 (10.0.0.1), ib0 (10.1.0.1)"),
        ({"eth0": ""}, None, WARN, "no interface with an IPv4 address"),
        ({"eth0": "10.0.0.1"}, "lo", WARN, "reaches no other node"),
        ({"eth0": "10.0.0.1"}, "eth7x", FAIL, "no such interface"),
    ],
)
def test_interfaces(
    there: dict[str, str], variable: str | None, status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_checks, "interfaces", lambda: there)
    if variable is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", variable)
    finding = found(doctor_checks.check_interfaces())["GLOO_SOCKET_IFNAME"]
    assert finding.status == status
    assert said in finding.text
    assert bool(finding.remedy) == (status != OK)
    if len(there) > 1:
        assert "export GLOO_SOCKET_IFNAME=NAME" in finding.remedy


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGATRON_LOCO_CACHE", str(tmp_path / "file" / "cache"))
    finding = found(doctor_checks.check_cache())["cache folder"]
    assert finding.status == FAIL
    assert "MEGATRON_LOCO_CACHE" in finding.remedy


def test_kernels_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_loco.kernels import registry

    def refuse(name: str, device: torch.device) -> None:
        raise ValueError("no compiler")

    monkeypatch.setattr(registry, "select_backend", refuse)
    finding = found(doctor_checks.check_kernels())["kernels for cpu"]
    assert (finding.status, finding.text) == (WARN, "no compiler")


@pytest.mark.parametrize(
    ("environment", "words", "said"),
    [
        ({"RANK": "0"}, [], "lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, ["--nproc", "2"], "RANK is set"),
        ({}, ["--timeout", "0"], "--timeout must be greater than 0"),
    ],
)
def test_wrong_usage(
    environment: dict[str, str],
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert doctor.main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("free", "capability", "status"), [(70, (8, 0), OK), (10, (8, 0), WARN), (70, (7, 5), WARN)])
def test_gpus(free: int, capability: tuple[int, int], status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A100")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
    findings = found(doctor_checks.check_gpus())
    assert [findings[name].status for name in ("GPU 0", "GPU 1")] == [status] * 2
    assert findings["GPU 1"].text == f"A100, {free}.0 of 80.0 GiB free"
    assert findings["NCCL"].text == "2.28.3"
