"""The comparison with torch's DDP hooks: what it counts, on a few steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_loco.bench import hooks
from megatron_loco.bench.llama import Llama


@pytest.mark.kind(40)
def test_bytes_are_those_of_the_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arms = ["fp32", "bf16", "PowerSGD rank 4", "LoCo 4 bits, back in bf16"]
    # Compression begins in the last step: the same weights before it, and so nearly the same loss after it.
    results = {result.arm: result for result in hooks.run(2, hooks.EXACT_STEPS + 1, [1], arms)}
    numel = sum(param.numel() for param in Llama().parameters())
    # A ring all-reduce over two ranks moves every element once.
    assert results["fp32"].step_bytes == 4 * numel
    assert results["bf16"].step_bytes == 2 * numel
    loco = results["LoCo 4 bits, back in bf16"]
    assert hooks.agrees(loco)
    # Half of the elements in 4 bits and a scale per 256, the other half back in 16; exact norms and padding are little.
    assert loco.step_bytes == pytest.approx(numel * (4.125 + 16) / 2 / 8, rel=0.02)
    assert results["PowerSGD rank 4"].step_bytes < loco.step_bytes
    for result in results.values():
        assert result.loss == pytest.approx(results["fp32"].loss, abs=0.05)


def test_wrong_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert hooks.main(["--ranks", "1"]) == 2
    assert hooks.main(["--steps", str(hooks.EXACT_STEPS)]) == 2
    assert "--ranks must be at least 2" in capsys.readouterr().err
