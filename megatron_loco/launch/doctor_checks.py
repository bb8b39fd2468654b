"""Checks of :mod:`megatron_loco.launch.doctor` that need no other rank."""

from __future__ import annotations

import os
import platform
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

OK, WARN, FAIL, NOT_APPLICABLE = "ok", "warn", "fail", "not applicable"

_VIRTUAL = ("lo", "docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "tun", "tap", "dummy")
_REQUIREMENTS = {"torch": ">=2.9,<2.15", "megatron-core": ">=0.16.1,<0.20"}
"""As in setup.py; used where the package runs from a checkout and has no metadata. A test compares the two."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one check: what was found, and for WARN and FAIL what to do."""

    name: str
    status: str
    text: str
    remedy: str = ""


def check_versions() -> Iterator[Finding]:
    """Python, torch, megatron-core and triton against what the package supports."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    python = platform.python_version()
    if (3, 12) <= sys.version_info[:2] < (3, 14):
        yield Finding("python", OK, python)
    else:
        yield Finding("python", FAIL, python, "use Python 3.12 or 3.13 (megatron-core has no wheel for others)")
    for package, allowed in requirements().items():
        try:
            installed = _installed(package)
        except (PackageNotFoundError, ImportError):
            yield Finding(package, FAIL, "is not installed", f"pip install '{package}{allowed}'")
            continue
        if Version(Version(installed).public) in SpecifierSet(allowed, prereleases=True):
            yield Finding(package, OK, installed)
        else:
            yield Finding(package, FAIL, f"{installed} is not supported", f"pip install '{package}{allowed}'")
    try:
        yield Finding("triton", OK, version("triton"))
    except PackageNotFoundError:
        import torch

        if torch.cuda.is_available():
            yield Finding("triton", FAIL, "is not installed; GPUs need it", "install the triton that torch asks for")
        else:
            yield Finding("triton", NOT_APPLICABLE, "not installed, and no GPU to use it")


def requirements() -> dict[str, str]:
    """Supported versions of what has to fit closely: package -> specifier."""
    from packaging.requirements import Requirement

    try:
        declared = [Requirement(line) for line in requires("megatron-loco") or ()]
    except PackageNotFoundError:
        declared = []
    found = {each.name: str(each.specifier) for each in declared if each.name in _REQUIREMENTS and each.marker is None}
    return {**_REQUIREMENTS, **found}


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        if package != "megatron-core":
            raise
    import megatron.core  # a source checkout on PYTHONPATH has no metadata, but knows its version

    return str(megatron.core.__version__)


def check_gpus() -> Iterator[Finding]:
    """GPUs, their memory, and NCCL."""
    import torch

    if not torch.cuda.is_available():
        yield Finding("GPUs", NOT_APPLICABLE, "torch sees none; ranks run on the CPU")
        yield Finding("NCCL", NOT_APPLICABLE, "no GPU")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        capability = torch.cuda.get_device_capability(index)
        text = f"{torch.cuda.get_device_name(index)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        name = f"GPU {index}"
        if capability < (8, 0):
            yield Finding(name, WARN, text, "older than compute capability 8.0: no bf16, and kernels not tested there")
        elif free < total / 2:
            yield Finding(name, WARN, text, "another process holds its memory; look with nvidia-smi")
        else:
            yield Finding(name, OK, text)
    if torch.distributed.is_nccl_available():
        yield Finding("NCCL", OK, ".".join(map(str, torch.cuda.nccl.version())))
    else:
        yield Finding("NCCL", FAIL, "this build of torch has none", "install torch built for CUDA")


def check_kernels() -> Iterator[Finding]:
    """The fast backend of each device, compiled and compared with the reference. A GPU is in vain without its own."""
    import torch

    from megatron_loco.kernels.registry import select_backend

    devices = {"cpu": "cpu", **({"cuda": "triton"} if torch.cuda.is_available() else {})}
    for device, backend in devices.items():
        try:
            select_backend(backend, torch.device(device))
            yield Finding(f"kernels for {device}", OK, f"{backend} backend works, same results as the reference")
        except ValueError as error:
            remedy = "until then --loco-backend auto uses plain PyTorch, ten times slower or more"
            yield Finding(f"kernels for {device}", FAIL if device == "cuda" else WARN, str(error), remedy)
    if "cuda" not in devices:
        yield Finding("kernels for cuda", NOT_APPLICABLE, "no GPU")


def check_cache() -> Iterator[Finding]:
    """The folder where compiled kernels are kept."""
    from megatron_loco.kernels.cpu_build import cache_folder

    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        remedy = "set MEGATRON_LOCO_CACHE to a folder that you can write to"
        yield Finding("cache folder", FAIL, f"{folder}: {error.strerror}", remedy)
    else:
        yield Finding("cache folder", OK, f"{folder} can be written")


def interfaces() -> dict[str, str]:
    """Network interfaces that are up and lead to other machines: name -> address, or an empty text if it has none."""
    import psutil

    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    found = {}
    for name, state in states.items():
        if state.isup and not name.startswith(_VIRTUAL):
            ipv4 = [each.address for each in addresses.get(name, ()) if each.family == socket.AF_INET]
            found[name] = ipv4[0] if ipv4 else ""
    return found


def check_interfaces() -> Iterator[Finding]:
    """Which interface Gloo and NCCL would use between nodes."""
    candidates = {name: address for name, address in interfaces().items() if address}
    shown = ", ".join(f"{name} ({address})" for name, address in candidates.items())
    import torch

    backends = ["GLOO", *(["NCCL"] if torch.cuda.is_available() else [])]
    for backend in backends:
        variable = f"{backend}_SOCKET_IFNAME"
        chosen = os.environ.get(variable)
        if chosen:
            yield _chosen(variable, chosen, candidates)
        elif not candidates:
            remedy = f"one node works over the loopback; for several set {variable} to the interface between them"
            yield Finding(variable, WARN, "not set, and no interface with an IPv4 address leads elsewhere", remedy)
        elif len(candidates) > 1:
            first = next(iter(candidates))
            remedy = f"export {variable}=NAME on every node: the one that reaches the other nodes, e.g. {first}"
            yield Finding(variable, WARN, f"not set, and there are several candidates: {shown}", remedy)
        else:
            yield Finding(variable, OK, f"not set; the only candidate is {shown}")
    if "NCCL" not in backends:
        yield Finding("NCCL_SOCKET_IFNAME", NOT_APPLICABLE, "no GPU")


def _chosen(variable: str, chosen: str, candidates: dict[str, str]) -> Finding:
    import psutil

    known = psutil.net_if_addrs()
    # NCCL takes prefixes, "=" for exact names and "^" for what to leave out; Gloo takes names.
    names = [name.strip() for name in chosen.lstrip("=^").split(",")]
    exact = variable.startswith("GLOO") or chosen.startswith("=")
    missing = [n for n in names if not (n in known if exact else any(each.startswith(n) for each in known))]
    if missing and not chosen.startswith("^"):
        remedy = f"set it to one of {', '.join(candidates or known)}"
        return Finding(variable, FAIL, f"{chosen}: no such interface here ({', '.join(missing)})", remedy)
    if "lo" in names and not chosen.startswith("^"):
        return Finding(variable, WARN, f"{chosen}: the loopback reaches no other node", "unset it for several nodes")
    return Finding(variable, OK, chosen)


def check_host_name() -> Iterator[Finding]:
    """Whether this machine's name leads to an address, which rendezvous and Gloo look up."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        remedy = "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME and pass --master-addr as a number"
        yield Finding("host name", WARN, "does not resolve to an address", remedy)
        return
    if address.startswith("127."):
        remedy = "fine on one node; for several pass the address that they reach as MASTER_ADDR, not the name"
        yield Finding("host name", WARN if interfaces() else OK, f"resolves to the loopback, {address}", remedy)
    else:
        yield Finding("host name", OK, f"resolves to {address}")


def check_shared_memory() -> Iterator[Finding]:
    """Room in /dev/shm, which NCCL and data loaders use; containers often have 64 MB."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        yield Finding("shared memory", NOT_APPLICABLE, "no /dev/shm")
        return
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    if free < 2**28:
        remedy = "start the container with --ipc=host or --shm-size=1g"
        yield Finding("shared memory", WARN, f"{free / 2**20:.0f} MiB free in /dev/shm", remedy)
    else:
        yield Finding("shared memory", OK, f"{free / 2**30:.1f} GiB free in /dev/shm")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_versions,
    check_gpus,
    check_cache,
    check_kernels,
    check_shared_memory,
    check_interfaces,
    check_host_name,
)
