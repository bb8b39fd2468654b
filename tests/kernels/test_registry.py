"""Which backend is chosen, and what is said when the fast one cannot be had."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_loco.config import BACKENDS, LoCoConfig
from megatron_loco.core.wire import BucketLayout
from megatron_loco.kernels import cpu_build, registry, self_test
from megatron_loco.kernels.cpu_backend import CpuBackend
from megatron_loco.kernels.cpu_build import FLAGS
from megatron_loco.kernels.reference import ReferenceBackend
from megatron_loco.kernels.registry import select_backend
from tests._buckets import CPU


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> Iterator[None]:
    caches = (registry._problem, registry._warn, cpu_build.load_kernels)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_auto_takes_the_compiled_one() -> None:
    assert isinstance(select_backend("auto", CPU), CpuBackend)
    assert isinstance(select_backend("cpu", CPU), CpuBackend)
    assert isinstance(select_backend("reference", CPU), ReferenceBackend)


def test_names() -> None:
    for name in BACKENDS:
        LoCoConfig(bits=4, backend=name)
    with pytest.raises(ValueError, match="--loco-backend must be one of auto, reference, cpu, triton, got 'nvcc'"):
        select_backend("nvcc", CPU)


@pytest.mark.parametrize(("name", "device"), [("triton", "cpu"), ("cpu", "cuda"), ("auto", "xpu"), ("cpu", "xpu")])
def test_backend_of_another_device_is_refused(name: str, device: str) -> None:
    with pytest.raises(ValueError, match=f"--loco-backend {name}: .*device {device}.*'reference'"):
        select_backend(name, torch.device(device))


@pytest.mark.parametrize("missing", ["nothing on PATH", "CXX"])
def test_without_a_compiler_the_reference_is_used_and_that_is_said_once(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEGATRON_LOCO_CACHE", str(tmp_path))
    if missing == "CXX":
        monkeypatch.setenv("CXX", "no-such-compiler -O3")
    else:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert isinstance(select_backend("auto", CPU), ReferenceBackend)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    for part in ("plain PyTorch", "no C++ compiler found", "g++", "CXX"):
        assert part in record.getMessage()
    with pytest.raises(ValueError, match=r"--loco-backend cpu: no C\+\+ compiler found .*install"):
        select_backend("cpu", CPU)


def test_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\ncase $1 in --version) echo 1;; *) echo 'cannot find -lgomp' >&2; exit 1;; esac\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("MEGATRON_LOCO_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"(?s)--loco-backend cpu: .*failed:\n  cannot find -lgomp\n.*install"):
        select_backend("cpu", CPU)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] in ([".lock"], [])


def test_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEGATRON_LOCO_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ValueError, match=r"--loco-backend cpu: cannot store or load .*MEGATRON_LOCO_CACHE"):
        select_backend("cpu", CPU)


def test_compiles_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEGATRON_LOCO_CACHE", str(tmp_path))
    calls = []
    compile_kernels = cpu_build._compile
    monkeypatch.setattr(cpu_build, "_compile", lambda *a: (calls.append(a), compile_kernels(*a)))
    for _ in range(2):
        cpu_build.load_kernels.cache_clear()
        cpu_build.load_kernels()
    assert len(calls) == 1
    assert len(list(tmp_path.glob("*.so"))) == 1
    # Another source, compiler, machine or torch is another library.
    monkeypatch.setattr(cpu_build, "FLAGS", [*FLAGS, "-DANOTHER"])
    cpu_build.load_kernels.cache_clear()
    cpu_build.load_kernels()
    assert len(calls) == 2
    assert len(list(tmp_path.glob("*.so"))) == 2


def test_flags_forbid_what_changes_results() -> None:
    assert "-ffp-contract=off" in FLAGS
    assert not {"-ffast-math", "-Ofast", "-funsafe-math-optimizations", "-fassociative-math"} & set(FLAGS)


class _Wrong(ReferenceBackend):
    """Its sums are a last bit off, as those of a fused multiply-add may be."""

    name = "cpu"

    def decode_sum(self, recv: Tensor, layout: BucketLayout, rank: int, output: Tensor, *, divisor: int) -> None:
        super().decode_sum(recv, layout, rank, output, divisor=divisor)
        bits = output.view(torch.int16)
        bits[5] += 1


def test_backend_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert self_test.differences(ReferenceBackend(), CPU) == []
    assert self_test.differences(CpuBackend(), CPU) == []
    assert self_test.differences(_Wrong(), CPU) == [
        "sums of 4 bits with an error of 8 bits",
        "sums of 8 bits with an error of 16 bits",
        "sums of 1 bits with an error of 8 bits",
    ]
    monkeypatch.setattr(registry, "_make", lambda name, device: _Wrong())
    with caplog.at_level(logging.WARNING):
        assert type(select_backend("auto", CPU)) is ReferenceBackend
    assert "computes something else" in caplog.text
    with pytest.raises(ValueError, match="--loco-backend cpu: it computes something else"):
        select_backend("cpu", CPU)


def test_gpu_without_triton(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    # Triton is imported only when it is chosen; here it is not there.
    monkeypatch.setitem(sys.modules, "triton", None)
    cuda = torch.device("cuda")
    with caplog.at_level(logging.WARNING):
        assert type(select_backend("auto", cuda)) is ReferenceBackend
    assert "the triton backend cannot be used: Triton is not installed" in caplog.text
    with pytest.raises(ValueError, match=r"^--loco-backend triton: Triton is not installed; install it"):
        select_backend("triton", cuda)
