"""Entering and leaving: the only place that changes the process."""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from types import TracebackType

import torch
from torch.overrides import _get_current_function_mode

from megatron_loco.cpu import device, gloo, megatron, placement, rng
from megatron_loco.patching import Patch, PatchHandle, apply

PATCHES: tuple[Patch, ...] = (
    *placement.PATCHES,
    *device.PATCHES,
    *rng.PATCHES,
    *gloo.PATCHES,
    *megatron.PATCHES,
)
"""What is replaced while the runtime is active; a release may need some more."""

_active: Runtime | None = None


class Runtime:
    """An entered runtime; made by :func:`enter`. A context manager, or call :meth:`exit`."""

    def __init__(self) -> None:
        self._mode = placement.CudaMeansCpu()
        with contextlib.ExitStack() as undo:
            _set_environment("TORCHDYNAMO_DISABLE", "1", undo)
            version = _import_megatron()
            undo.enter_context(_no_compilation())
            rng.split_generators()
            undo.callback(rng.join_generators)
            self._patches: PatchHandle = undo.enter_context(apply((*PATCHES, *megatron.patches_of(version))))
            undo.enter_context(self._mode)
            self._undo = undo.pop_all()

    @property
    def targets(self) -> tuple[str, ...]:
        """What is replaced, as ``"module:attribute"``; empty after exit."""
        return self._patches.targets

    def exit(self) -> None:
        """Restore everything; a second call does nothing.

        Raises:
            RuntimeError: somebody replaced one of our attributes or entered a torch function mode afterwards.
                Nothing is restored then.
        """
        global _active
        if _active is not self:
            return
        if _get_current_function_mode() is not self._mode:
            raise RuntimeError("cannot leave the CPU runtime: a torch function mode was entered afterwards; exit it")
        self._patches.remove()
        self._undo.close()
        _active = None

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.exit()


def enter(*, force: bool = False) -> Runtime:
    """Make this process one that runs Megatron on the CPU, until :meth:`Runtime.exit`.

    Imports Megatron. Enter before the script that imports the rest of it, in the thread that trains.

    Args:
        force: Enter although CUDA is available (``torch.cuda.is_available()`` stays true, so that Megatron may still
            take paths of the GPU; meant for looking at the runtime, not for training).

    Raises:
        RuntimeError: CUDA is available, or the runtime is active already.
        SeamError: Megatron or torch is not one that the runtime fits; nothing is changed then.
    """
    global _active
    if _active is not None:
        raise RuntimeError("the CPU runtime is active already; call exit() on it first")
    if torch.cuda.is_available() and not force:
        raise RuntimeError(
            "CUDA is available, and the CPU runtime would hide it from Megatron. Train on the GPU without it, hide the "
            'GPU with CUDA_VISIBLE_DEVICES="", or pass force=True.'
        )
    _active = Runtime()
    return _active


def _set_environment(name: str, value: str, undo: contextlib.ExitStack) -> None:
    # Not a generator as context manager: Python would close one at interpreter exit, when os is gone already.
    before = os.environ.get(name)
    os.environ[name] = value
    if before is None:
        undo.callback(os.environ.pop, name, None)
    else:
        undo.callback(os.environ.__setitem__, name, before)


def _import_megatron() -> str:
    # Megatron warns once per module that Transformer Engine and Apex are missing. Without a GPU that is as it should
    # be, so the import (and nothing later) is kept quiet about it.
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*(Transformer Engine|transformer-engine|Apex)", category=UserWarning
        )
        importlib.import_module("megatron.training.training")
    version: str = importlib.import_module("megatron.core").__version__
    return version


def _no_compilation() -> contextlib.AbstractContextManager[None]:
    # torch.compile reads TORCHDYNAMO_DISABLE when it decorates a function. Megatron decorates at import, so for one
    # that was imported before enter() the stance is needed, which holds for calls.
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance
