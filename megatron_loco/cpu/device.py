"""The one device of a rank and its one stream, as Megatron asks ``torch.cuda`` for them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from megatron_loco.cpu.placement import CPU
from megatron_loco.patching import Patch


@dataclass(frozen=True)
class CpuProperties:
    """The fields of ``torch.cuda.get_device_properties`` that Megatron reads on the supported path.

    Compute capability 10.0: below it Megatron insists on CUDA_DEVICE_MAX_CONNECTIONS=1 with tensor parallelism, to
    order the launches of kernels, which a CPU does not have; ``--moe-grouped-gemm`` wants at least 8.
    """

    name: str = "cpu"
    major: int = 10
    minor: int = 0


class ProgramOrder:
    """A stream of a device that runs everything at once and in program order: there is nothing to wait for."""

    device = CPU

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: work on the other stream is done."""

    def record_event(self, event: Any = None) -> ProgramOrder:
        """Return what the MoE dispatcher then synchronizes with: the stream itself, which is always done."""
        return self

    def synchronize(self) -> None:
        """Do nothing: all work is done."""


_THE_STREAM = ProgramOrder()


def local_ranks() -> int:
    """``torch.cuda.device_count``: one device for each rank on this machine, as torchrun counts them.

    Needed by ``megatron.training.initialize:_initialize_distributed`` and ``_set_random_seed``, which set up model
    parallel groups and the device's random numbers only where there is a device.
    """
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def the_cpu() -> torch.device:
    """``torch.cuda.current_device``: a device and not an index, because an index always means an accelerator.

    Needed by every ``device=torch.cuda.current_device()``, for example in ``ColumnParallelLinear.__init__`` and
    ``_ParamAndGradBuffer.__init__``.
    """
    return CPU


def keep_device(device: Any) -> None:
    """``torch.cuda.set_device``: nothing to choose. Needed by ``_initialize_distributed``."""


def cpu_properties(device: Any = None) -> CpuProperties:
    """``torch.cuda.get_device_properties``.

    Needed by ``get_device_arch_version`` in ``validate_args`` (tensor parallelism) and, through
    ``torch.cuda.get_device_capability``, by its check for ``--moe-grouped-gemm``.
    """
    return CpuProperties()


def the_stream(device: Any = None) -> ProgramOrder:
    """``torch.cuda.current_stream``. Needed by ``get_model`` and ``_ParamAndGradBucketGroup.start_grad_sync``.

    ``torch.cuda.stream(...)`` needs no patch: without CUDA its context does nothing.
    """
    return _THE_STREAM


def already_synchronized(device: Any = None) -> None:
    """``torch.cuda.synchronize``: nothing is pending. Needed by ``megatron.core.timers`` and by pipeline exchange."""


PATCHES = (
    Patch(
        target="torch.cuda:device_count",
        kind="replace",
        new=local_ranks,
        why="with no device, initialize_megatron builds no model parallel groups and seeds no device",
    ),
    Patch(
        target="torch.cuda:current_device",
        kind="replace",
        new=the_cpu,
        why="layers and buffers are allocated on torch.cuda.current_device(), which raises without CUDA",
    ),
    Patch(
        target="torch.cuda:set_device",
        kind="replace",
        new=keep_device,
        why="_initialize_distributed sets the device of the rank, which raises without CUDA",
    ),
    Patch(
        target="torch.cuda:get_device_properties",
        kind="replace",
        new=cpu_properties,
        why="validate_args reads the compute capability with tensor parallelism and grouped GEMM",
    ),
    Patch(
        target="torch.cuda:Stream",
        kind="replace",
        new=ProgramOrder,
        why="get_model and DDP create streams; the class of a torch without CUDA raises",
    ),
    Patch(
        target="torch.cuda:current_stream",
        kind="replace",
        new=the_stream,
        why="get_model and the gradient buckets order their streams after the current one",
    ),
    Patch(
        target="torch.cuda:synchronize",
        kind="replace",
        new=already_synchronized,
        why="timers, pipeline exchange and checkpointing wait for the device, which raises without CUDA",
    ),
)
