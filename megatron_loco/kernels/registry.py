"""Choice of a backend by name and device."""

from __future__ import annotations

import functools
import logging

import torch

from megatron_loco.config import BACKENDS
from megatron_loco.kernels.cpu_build import BuildError
from megatron_loco.kernels.reference import ReferenceBackend
from megatron_loco.kernels.schema import Backend
from megatron_loco.kernels.self_test import differences

logger = logging.getLogger(__name__)

_FASTEST = {"cpu": "cpu", "cuda": "triton"}


def select_backend(name: str, device: torch.device) -> Backend:
    """Return the backend called ``name``, or for ``auto`` the fastest one for ``device``.

    All backends give the same bits, so that ranks may have different ones. Before its first use in a process a fast
    backend is compared with the reference (:mod:`megatron_loco.kernels.self_test`). Where ``auto`` cannot have it, the
    reference is used, which is said once, as a warning with the remedy.

    Raises:
        ValueError: no such backend, none for the device, or the one that was asked for cannot be had.
    """
    if name not in BACKENDS:
        raise ValueError(f"--loco-backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    if name == "reference":
        return ReferenceBackend()
    fastest = _FASTEST.get(device.type)
    if fastest is None:
        raise ValueError(f"--loco-backend {name}: no backend for device {device.type}; name 'reference' explicitly")
    if name not in ("auto", fastest) and not _runs_anywhere(name):
        raise ValueError(
            f"--loco-backend {name}: not for gradients on device {device.type}; use 'auto', '{fastest}' or 'reference'"
        )
    chosen = fastest if name == "auto" else name
    problem = _problem(chosen, device)
    if problem is None:
        return _make(chosen, device)
    if name != "auto":
        raise ValueError(f"--loco-backend {name}: {problem}")
    _warn(f"LoCo encodes with plain PyTorch, ten times slower or more: the {chosen} backend cannot be used: {problem}")
    return ReferenceBackend()


def _make(name: str, device: torch.device) -> Backend:
    # Imported only now: what one device needs, another lacks.
    if name == "cpu":
        from megatron_loco.kernels.cpu_backend import CpuBackend

        return CpuBackend()
    from megatron_loco.kernels.triton_backend import TritonBackend

    return TritonBackend(device)


def _runs_anywhere(name: str) -> bool:
    # Triton's interpreter, asked for in the environment, takes tensors of the CPU.
    if name != "triton":
        return False
    try:
        from triton import knobs
    except ImportError:
        return False
    return bool(knobs.runtime.interpret)


@functools.cache
def _problem(name: str, device: torch.device) -> str | None:
    # Why a backend cannot be used on a device.
    try:
        wrong = differences(_make(name, device), device)
    except Exception as error:  # whatever it is (Triton's errors are of no common kind): it is said, and decides
        text = str(error).removeprefix(f"--loco-backend {name}: ")
        return text if isinstance(error, BuildError | ValueError) else f"{type(error).__name__}: {text}"
    if wrong:
        return f"it computes something else than the reference here ({', '.join(wrong)}); please report this"
    return None


@functools.cache
def _warn(message: str) -> None:
    logger.warning(message)
