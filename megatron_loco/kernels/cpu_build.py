"""Compiles ``cpu_kernels.cpp`` for this machine at first use, once per machine kind, and loads it.

The result lies in a cache folder under a name that holds everything it depends on: source, compiler, flags and the
features of the CPU. Nodes of different kinds that share a home folder so have a library each, and ranks that start
together compile once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch  # before the library is loaded: both then use torch's own OpenMP runtime
from filelock import FileLock, Timeout

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
COMPILERS = ("c++", "g++", "clang++")
LOCK_SECONDS = 300.0

FLAGS = [
    "-std=c++17",
    "-O3",
    "-shared",
    "-fPIC",
    "-fopenmp",
    # Each of these keeps or allows what the reference computes: no fused multiply-add, no reordering of sums.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
]

REMEDY = (
    "install a C++17 compiler with OpenMP (Debian, Ubuntu: g++; RHEL: gcc-c++; conda: cxx-compiler) or name one in CXX"
)


class BuildError(RuntimeError):
    """The kernels cannot be compiled or loaded; the message says why, and what helps."""


@functools.cache
def load_kernels(machine_flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Return the compiled kernels, compiling them if need be.

    Args:
        machine_flags: What to compile for; default: this machine.

    Raises:
        BuildError: no compiler, or it or the loading fails.
    """
    command = [*_compiler(), *FLAGS, *(machine_flags or _machine_flags())]
    path = cache_folder() / f"cpu_kernels-{_fingerprint(command)}.so"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            with FileLock(f"{path}.lock", timeout=LOCK_SECONDS):
                if not path.is_file():
                    _compile(command, path)
        return ctypes.CDLL(str(path))
    except Timeout as error:
        raise BuildError(
            f"another process has been compiling {path} for {LOCK_SECONDS:.0f} s; if there is none, delete {path}.lock"
        ) from error
    except OSError as error:
        raise BuildError(
            f"cannot store or load {path}: {error}; set MEGATRON_LOCO_CACHE to a folder of yours"
        ) from error


def _compiler() -> list[str]:
    given = os.environ.get("CXX")
    compiler = shlex.split(given) if given else next(([name] for name in COMPILERS if shutil.which(name)), None)
    if compiler is None or shutil.which(compiler[0]) is None:
        looked_for = f"CXX={given}" if given else ", ".join(COMPILERS)
        raise BuildError(f"no C++ compiler found ({looked_for}): {REMEDY}")
    return compiler


def _machine_flags() -> list[str]:
    if platform.machine() in ("x86_64", "AMD64"):
        # Compilers prefer half as wide vectors by default on CPUs that can do 512 bits.
        return ["-march=native", "-mprefer-vector-width=512"]
    return ["-mcpu=native"]


def cache_folder() -> Path:
    """Where compiled kernels are kept between processes: ``MEGATRON_LOCO_CACHE``, or in the user's cache folder."""
    given = os.environ.get("MEGATRON_LOCO_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "megatron_loco"


def _fingerprint(command: list[str]) -> str:
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=False).stdout
    known = (SOURCE.read_text(encoding="utf-8"), *command, version, torch.__version__, *_cpu_features())
    return hashlib.sha256("\0".join(known).encode()).hexdigest()[:16]


def _cpu_features() -> list[str]:
    # What -march=native looks at. Of the first core: a machine's cores are alike, apart from clock and number.
    wanted = ("vendor_id", "cpu family", "model\t", "flags", "Features", "CPU part")
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        return [platform.processor()]
    return [line for line in first.splitlines() if line.startswith(wanted)]


def _compile(command: list[str], path: Path) -> None:
    # Renamed when it is whole: another process never loads half a library.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        result = Path(folder) / "kernels.so"
        done = subprocess.run(
            [*command, "-o", str(result), str(SOURCE)],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            last = "\n  ".join(done.stderr.strip().splitlines()[-5:])
            raise BuildError(f"{shlex.join(command)} failed:\n  {last}\n{REMEDY}")
        os.replace(result, path)
