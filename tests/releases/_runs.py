"""Runs of :mod:`tests.releases._program` in copies of the releases, all of them once per session."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from megatron_loco.launch import patch_tree
from tests._releases import RELEASES, ROOT, release_folder

UNPATCHED_FILE = "megatron/core/rerun_state_machine.py"


def runtime(version: str) -> dict[str, Any]:
    """What the program found in a release, LoCo installed by ``patch()``."""
    return _run(version, "runtime")


def static(version: str) -> dict[str, Any]:
    """The same in a copy whose files ``megatron-loco patch apply`` has changed."""
    return _run(version, "static")


def partly(version: str) -> dict[str, Any]:
    """The same in a copy that has all of its files changed but one."""
    return _run(version, "partly")


def copy_release(version: str, folder: Path) -> None:
    """Copy the files of a release, package metadata included, to a folder."""
    source = release_folder(version)
    for part in (source / "megatron", *source.glob("megatron_core-*.dist-info")):
        shutil.copytree(part, folder / part.name, ignore=shutil.ignore_patterns("__pycache__"))


def patch_command(*words: object) -> tuple[int, str, str]:
    """Run ``megatron-loco patch``; return status, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = patch_tree.main([str(word) for word in words])
    return status, out.getvalue(), err.getvalue()


def _run(version: str, route: str) -> dict[str, Any]:
    release_folder(version)  # skips the test where it is not to be had
    result = _runs()[f"{route}-{version}"]
    assert isinstance(result, dict), result
    return result


@functools.cache
def _runs() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as root:
        folders = []
        for version in RELEASES:
            with contextlib.suppress(pytest.skip.Exception):
                for route in ("runtime", "static", *(["partly"] if version == RELEASES[0] else [])):
                    folder = Path(root, f"{route}-{version}")
                    copy_release(version, folder)
                    folders.append(folder)
                    stock = (folder / UNPATCHED_FILE).read_bytes()
                    if route != "runtime":
                        assert patch_command("apply", folder)[0] == 0
                    if route == "partly":
                        (folder / UNPATCHED_FILE).write_bytes(stock)
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tests.releases._program", *map(str, folders)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        found = {folder.name: Path(f"{folder}.json") for folder in folders}
        return {
            name: json.loads(file.read_text()) if file.is_file() else done.stderr[-5000:]
            for name, file in found.items()
        }
