"""Training scripts of a Megatron-LM checkout, and whose Megatron is imported then."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_loco.launch import checkout
from megatron_loco.launch.run_config import RunConfig

ROOT = Path(__file__).parents[2]

PROGRAM = """
import importlib.util, pathlib, sys
from megatron_loco.launch.checkout import prefer_megatron_of
prefer_megatron_of(pathlib.Path(sys.argv[1]))
print(importlib.util.find_spec("megatron.core").origin)
"""


def test_script_of_the_checkout(tmp_path: Path) -> None:
    assert checkout.training_script({}) is None
    assert checkout.training_script({"MEGATRON_LM_DIR": ""}) is None
    here = {"MEGATRON_LM_DIR": str(tmp_path)}
    with pytest.raises(ValueError, match=r"MEGATRON_LM_DIR: .* is not a .* checkout .*\(no file .*pretrain_gpt\.py\)"):
        checkout.training_script(here)
    for name in ("pretrain_gpt.py", "pretrain_hybrid.py"):
        (tmp_path / name).touch()
    assert checkout.training_script(here) == tmp_path / "pretrain_gpt.py"
    assert checkout.training_script(here, "pretrain_hybrid.py") == tmp_path / "pretrain_hybrid.py"
    with pytest.raises(ValueError, match=r"no file .*other\.py"):
        checkout.training_script(here, "other.py")


@pytest.mark.parametrize("script", ["", "/anywhere/pretrain_gpt.py", "../pretrain_gpt.py"])
def test_script_lies_inside_the_checkout(script: str) -> None:
    with pytest.raises(ValueError, match="script must be a path inside the checkout in MEGATRON_LM_DIR"):
        RunConfig(name="run", script=script)


def test_other_scripts_need_a_checkout() -> None:
    with pytest.raises(ValueError, match=r"run\.script is pretrain_hybrid\.py: set MEGATRON_LM_DIR"):
        checkout.training_script({}, "pretrain_hybrid.py")
    assert checkout.training_script({}, "./pretrain_gpt.py") is None


@pytest.mark.parametrize("script", [None, Path("/m/pretrain_gpt.py")])
def test_hybrid_model_needs_its_script(script: Path | None) -> None:
    hybrid = Namespace(hybrid_layer_pattern="*-*-")
    with pytest.raises(ValueError, match=r"run\.script=pretrain_hybrid\.py, and MEGATRON_LM_DIR"):
        checkout.check_script(hybrid, script)
    checkout.check_script(hybrid, Path("/m/pretrain_hybrid.py"))
    for other in (Namespace(hybrid_layer_pattern=None), Namespace()):  # 0.16 does not have the attribute
        checkout.check_script(other, script)


def _fake_checkout(folder: Path) -> Path:
    # Enough for the launcher, which asks this Megatron for its flags.
    for package in ("core", "training"):
        (folder / "megatron" / package).mkdir(parents=True)
    (folder / "megatron" / "core" / "__init__.py").write_text('__version__ = "0.18.2"\n')
    (folder / "megatron" / "training" / "__init__.py").touch()
    (folder / "megatron" / "training" / "arguments.py").write_text(
        "def add_megatron_arguments(parser):\n    parser.add_argument('--flag-of-the-checkout')\n    return parser\n"
    )
    script = folder / "pretrain_gpt.py"
    script.write_text("import megatron.core\nprint(megatron.core.__version__)\n")
    return script


def _run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )


def test_launcher_asks_the_megatron_of_the_checkout(tmp_path: Path) -> None:
    _fake_checkout(tmp_path)
    config = tmp_path / "small.yaml"
    config.write_text("run:\n  device: cpu\ntraining:\n  num-layers: 1\n")
    done = _run("-m", "megatron_loco.launch", str(config), "--dry-run", MEGATRON_LM_DIR=str(tmp_path))
    assert done.returncode == 2
    assert "training.num-layers: Megatron has no flag --num-layers" in done.stderr


def test_another_megatron_that_comes_first_is_an_error(tmp_path: Path) -> None:
    script = _fake_checkout(tmp_path / "checkout")
    # A regular package is preferred to the parts of a namespace, wherever it lies.
    other = _fake_checkout(tmp_path / "other").parent
    (other / "megatron" / "__init__.py").touch()
    done = _run("-c", PROGRAM, str(script), PYTHONPATH=os.pathsep.join([str(other), str(ROOT)]))
    assert done.returncode == 1
    core = Path("megatron", "core")
    assert f"comes from {other / core}/__init__.py and not from {tmp_path / 'checkout' / core};" in done.stderr


@pytest.mark.parametrize("has_megatron", [True, False])
def test_megatron_beside_the_script_or_the_installed_one(has_megatron: bool, tmp_path: Path) -> None:
    script = _fake_checkout(tmp_path)
    if not has_megatron:
        shutil.rmtree(tmp_path / "megatron")
    done = _run("-c", PROGRAM, str(script), PYTHONPATH=str(ROOT))
    installed = importlib.util.find_spec("megatron.core")
    assert installed is not None
    expected = str(tmp_path / "megatron" / "core" / "__init__.py") if has_megatron else installed.origin
    assert done.stdout.strip() == expected, done.stderr
