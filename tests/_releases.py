"""Megatron-core of each supported release: its wheel, unpacked in the cache folder, and subprocesses that see it."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from megatron_loco.kernels.cpu_build import cache_folder

RELEASES = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")
"""The latest of each supported series. The wheel of 0.16 has no ``megatron.training``."""

_NEEDED_BY_TRAINING = {"0.17.1": ("pyyaml",), "0.18.2": ("pyyaml",)}
"""What ``megatron.training`` imports there without a ``try``, and this library's own requirements do not bring."""

ROOT = Path(__file__).parents[1]

_ONLY = """
# `megatron` is a namespace package: without this file, which makes it another kind that is preferred wherever it lies
# on the path, parts that a release lacks would come from the installed one.
import os

__path__ = [os.path.join(os.environ["MEGATRON_ONLY_FROM"], "megatron")]
"""


def release_folder(version: str) -> Path:
    """Return the folder that holds ``megatron/`` of a release; the installed one's is ``site-packages``.

    Nobody may change anything in it: copy first. Skips the test where the wheel cannot be fetched.
    """
    if importlib.metadata.version("megatron-core") == version:
        return _installed_folder()
    for package in _NEEDED_BY_TRAINING.get(version, ()):
        _unpacked(package, package)
    return _unpacked(f"megatron-core=={version}", f"megatron-core-{version}")


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Return the environment of a subprocess in which ``megatron`` comes from ``folder`` alone.

    Package metadata come from there as well, if it has some (an unpacked wheel), so that ``importlib.metadata`` tells
    its version; a checkout has none.

    Args:
        folder: Holds ``megatron/``: what :func:`release_folder` returns, a copy of it, or a checkout.
        more: Further variables.
    """
    path = [str(_only_folder()), str(ROOT)]
    if folder != _installed_folder():  # site-packages would otherwise come before the standard library
        path.insert(1, str(folder))
    path += [
        str(_releases_folder() / package) for package in sorted({p for n in _NEEDED_BY_TRAINING.values() for p in n})
    ]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "MEGATRON_ONLY_FROM": str(folder),
        **more,
    }


def check_origin() -> None:
    """Check, in a subprocess with :func:`environment`, that every module of Megatron came from its folder.

    Raises:
        AssertionError: one came from elsewhere, or there is none.
    """
    folder = Path(os.environ["MEGATRON_ONLY_FROM"]).resolve()
    files = {
        name: Path(module.__file__).resolve()
        for name, module in list(sys.modules.items())
        if name.startswith("megatron.") and getattr(module, "__file__", None)
    }
    assert files, "nothing of Megatron is imported"
    strays = [f"{name}: {file}" for name, file in files.items() if not file.is_relative_to(folder / "megatron")]
    assert not strays, strays


def run_python(folder: Path, program: str, *args: str, **more: str) -> str:
    """Run ``program`` with Megatron from ``folder``; return its standard output.

    Raises:
        AssertionError: it failed; with what it wrote.
    """
    done = subprocess.run(
        [sys.executable, "-c", program, *args], env=environment(folder, **more), capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def _unpacked(requirement: str, name: str) -> Path:
    folder, problem = _fetch(requirement, name)
    if folder is None:
        pytest.skip(f"{requirement} cannot be fetched: {problem}")
    return folder


@functools.cache
def _fetch(requirement: str, name: str) -> tuple[Path | None, str]:
    target = _releases_folder() / name
    if target.is_dir():
        return target, ""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        network = ["--retries", "1", "--timeout", "30", "--disable-pip-version-check"]
        done = subprocess.run(
            [*download, *network, "--dest", folder, requirement],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            return None, (done.stderr.strip().splitlines() or ["pip wrote nothing"])[-1]
        unpacked = Path(folder) / "unpacked"
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(unpacked)
        try:
            os.rename(unpacked, target)  # when it is whole, so that nobody meets half a release
        except OSError:
            assert target.is_dir()  # another process was faster
    return target, ""


def _releases_folder() -> Path:
    return cache_folder() / "releases"


@functools.cache
def _installed_folder() -> Path:
    return Path(str(importlib.metadata.distribution("megatron-core").locate_file("")))


@functools.cache
def _only_folder() -> Path:
    target = _releases_folder() / "only"
    (target / "megatron").mkdir(parents=True, exist_ok=True)
    file = target / "megatron" / "__init__.py"
    if not file.is_file() or file.read_text() != _ONLY:
        with tempfile.NamedTemporaryFile("w", dir=target, delete=False) as new:
            new.write(_ONLY)
        os.replace(new.name, file)
    return target
