"""The scripts in ``scripts/examples/``, as README starts them: they train, save, and go on where they were."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _torchrun(script: str, *flags: str) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*command, f"scripts/examples/{script}", *flags],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def _loss(output: str, step: int) -> str:
    losses = re.findall(rf"^step {step}: loss (\S+)$", output, re.MULTILINE)
    assert len(losses) == 1, output
    return losses[0]


@pytest.mark.kind(25, 27)
@pytest.mark.parametrize("script", ["fsdp2_llama.py", "ddp_llama.py"])
def test_an_example_trains_and_resumes(script: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    # The first ten reductions are exact: what is saved has an error state.
    straight = _torchrun(script, "--steps=20")
    _torchrun(script, "--steps=15", f"--save={folder}")
    resumed = _torchrun(script, "--steps=5", f"--load={folder}")
    assert _loss(resumed, 20) == _loss(straight, 20)
    # ln(257) = 5.55 nats is what an untrained model has.
    assert float(_loss(straight, 20)) < 4.0
    sent, in_bf16 = map(float, re.findall(r"gradients: (\S+) MB sent; in bf16 (\S+) MB", straight)[0])
    assert sent > 0
    # Ten exact steps in fp32 are twice bf16, ten in 4 bits a quarter (back in bf16: five eighths of the round trip).
    assert sent < in_bf16 * 1.4
