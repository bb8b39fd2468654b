"""Megatron's training loop of every supported release whose wheel has it: LoCo off and on, by each way to install it.

20 iterations of a small LLaMA on two ranks. Off must be the stock loop bit for bit; on, all ways must agree bitwise.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_loco.launch import patch_tree
from megatron_loco.launch.report import BITS, Run
from tests._releases import RELEASES, ROOT, environment, release_folder
from tests.integrations.megatron._training import (
    IMPORT_LINE,
    LOCO,
    OVERLAP,
    STOCK,
    differences,
    stop_server,
    train,
)

ITERATIONS = 20
ON = (*OVERLAP, "--loco-bits", "4", "--loco-warmup-steps", "2")


@pytest.mark.kind(26)
@pytest.mark.parametrize("release", [release for release in RELEASES if release != "0.16.1"])
def test_every_way_to_install(release: str, tmp_path: Path) -> None:
    tree = release_folder(release)
    patched = _statically_patched(tree, tmp_path / "tree")

    def arm(name: str, *flags: str, entry: tuple[str, ...], megatron: Path = tree) -> Run:
        return train(tmp_path / name, *flags, entry=entry, iterations=ITERATIONS, megatron=megatron)

    try:
        stock = arm("stock", entry=STOCK)
        assert differences(arm("off", entry=LOCO), stock) == []
        runtime = arm("runtime", *ON, entry=LOCO)
        assert differences(arm("import line", *ON, entry=IMPORT_LINE), runtime) == []
        assert differences(arm("static off", entry=STOCK, megatron=patched), stock) == []
        # Nothing of ours is in this script: the import of Megatron brings LoCo.
        assert differences(arm("static", *ON, entry=STOCK, megatron=patched), runtime) == []
    finally:
        stop_server(tree)
        stop_server(patched)
    assert set(stock.scalars["lm loss"]) == set(range(1, ITERATIONS + 1))
    # Exact for two steps, then 4 bits that are not the stock numbers but learn as well: the sanity bound of
    # tests/integrations/megatron/test_training.py, not a parity claim.
    losses, reference = runtime.scalars["lm loss"], stock.scalars["lm loss"]
    assert [losses[i] for i in (1, 2, 3)] == [reference[i] for i in (1, 2, 3)]
    assert losses[ITERATIONS] != reference[ITERATIONS]
    fall = reference[1] - reference[ITERATIONS]
    assert fall > 0
    assert all(abs(losses[i] - reference[i]) < 0.25 * fall for i in reference)
    assert 4.125 < runtime.scalars[BITS][3] < 4.3


def test_launcher_checks_flags_with_the_megatron_of_a_checkout(tmp_path: Path) -> None:
    tree = release_folder("0.17.1")
    (tmp_path / "megatron").symlink_to(tree / "megatron")
    (tmp_path / "pretrain_gpt.py").touch()
    # All that environment() adds but the tree: the launcher itself has to find that one.
    path = os.pathsep.join(environment(tree)["PYTHONPATH"].split(os.pathsep)[2:])
    # The flag was removed in 0.18.
    words = ["configs/llama_quickstart.yaml", "training.use-legacy-models=false", "run.corpus=null", "mock-data=true"]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_loco.launch", *words, "--dry-run"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "MEGATRON_LM_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "--loco-bits 4" in done.stdout


def _statically_patched(tree: Path, folder: Path) -> Path:
    # With metadata, which name the version, and compiled files, whose times the copy keeps.
    shutil.copytree(tree / "megatron", folder / "megatron")
    (metadata,) = tree.glob("megatron_core-*.dist-info")
    shutil.copytree(metadata, folder / metadata.name)
    assert patch_tree.main(["apply", str(folder)]) == 0
    return folder
