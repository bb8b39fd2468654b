"""The benchmark of the kernels: nothing is timed that computes something else; figures follow from the times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_loco.bench import kernels
from megatron_loco.bench.kernels import Case
from megatron_loco.core.wire import BucketLayout
from megatron_loco.kernels.reference import ReferenceBackend

QUICK = ["--buckets", "quickstart", "--threads", "1", "--repeats", "2", "--working-set-mb", "10"]


@pytest.fixture(autouse=True)
def threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.kind(25, 40)
def test_figures_follow_from_the_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main([*QUICK, "--dtypes", "bf16", "--json", str(tmp_path / "out.json")]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert {"cpu", "cores", "torch"} <= set(result["machine"])
    reference, cpu = result["rows"]
    assert (reference["backend"], cpu["backend"]) == ("reference", "cpu")
    # The quick start's matrices: 4 layers of 128 x (256 + 128 + 704 + 352), two embeddings of 257 x 128.
    numel = 4 * 128 * (256 + 128 + 704 + 352) + 2 * 257 * 128
    for row in (reference, cpu):
        assert row["numel"] == numel
        assert row["buffer_sets"] >= 2
        for operation, elements, least in (("encode", numel, 4.5), ("decode", numel // 4, 4 * 0.5 + 2)):
            figures = row[operation]
            floor = elements * least / (row["copy_gb_per_s"] * 1e9)
            assert figures["share_of_floor"] == pytest.approx(floor / figures["seconds"])
            assert figures["gb_per_s"] == pytest.approx(numel * 2 / figures["seconds"] / 1e9, rel=1e-4)
            assert figures["times_reference"] == pytest.approx(reference[operation]["seconds"] / figures["seconds"])
            low, high = figures["quartiles"]
            assert 0 < low <= figures["seconds"] <= high
            assert figures["rounds"] == 2
    printed = capsys.readouterr().out
    assert "quickstart" in printed
    assert "torch" in printed


@pytest.mark.kind(40)
def test_a_backend_that_differs_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Wrong(ReferenceBackend):
        name = "cpu"

        def decode_sum(self, recv: Tensor, layout: BucketLayout, rank: int, output: Tensor, *, divisor: int) -> None:
            super().decode_sum(recv, layout, rank, output, divisor=divisor)
            output[17] += 1

    monkeypatch.setattr(kernels, "select_backend", lambda name, device: Wrong())
    assert kernels.main([*QUICK, "--dtypes", "fp32", "--backends", "cpu"]) == 1
    out, err = capsys.readouterr()
    assert "cpu differs from the reference in" in err
    assert "sums" in err
    assert "nothing was measured" in err
    assert "quickstart" not in out


def test_least_traffic() -> None:
    # Read g, read and write e, write codes; read a code of each rank, write a sum.
    assert Case("quickstart", "bf16", 1).encode_bytes == 2 + 1 + 1 + 0.5
    assert Case("quickstart", "fp32", 1, bits=8, error_bits=16).encode_bytes == 4 + 2 + 2 + 1
    assert Case("quickstart", "fp32", 1, error_bits=0).encode_bytes == 4.5
    assert Case("quickstart", "bf16", 1, world_size=8).decode_bytes == 8 * 0.5 + 2


def test_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        kernels.main(["--device", "cuda"])
    assert "--device cuda: torch finds no GPU" in capsys.readouterr().err
