"""Random numbers: two generators, as on a GPU machine, although all tensors are on the CPU.

Megatron keeps the states of the host's and the device's generator apart. Here every draw that would be made on the
device (initial weights, dropout) is made by torch's CPU generator, so that one plays the *device*, and a generator of
our own plays the *host*. What draws on the host are the data loaders: each iterator takes one number as the seed of
its workers. With one generator for both, Megatron's tracker warns at each dropout ("CPU RNG state changed within GPU
RNG context") and a resumed run draws other dropout masks, because its loaders start at another iteration.

Limit: ``torch.utils.checkpoint`` restores the host's state only, since it sees no tensor on a device, so that
recomputation by it draws other dropout masks. Megatron's language models use ``tensor_parallel.checkpoint``, which
restores both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_loco.patching import Patch

# In the module, like the generator that it stands in for (torch.default_generator): one of each per process.
_HOST = torch.Generator()


def split_generators() -> None:
    """Start the host's generator where torch's CPU generator stands."""
    _HOST.set_state(torch.default_generator.get_state())


def join_generators() -> None:
    """Put torch's CPU generator where the host's stands: what the device drew leaves no trace."""
    torch.default_generator.set_state(_HOST.get_state())


def host_state() -> torch.Tensor:
    """``torch.get_rng_state``: the host's state, uint8. Needed by ``CudaRNGStatesTracker.fork``, which compares it."""
    return _HOST.get_state()


def set_host_state(new_state: torch.Tensor) -> None:
    """``torch.set_rng_state``. Needed by ``load_checkpoint``: the saved host state is not the device's."""
    _HOST.set_state(new_state)


def seed_both(original: Callable[[int], torch.Generator]) -> Callable[[int], torch.Generator]:
    """Wrap ``torch.manual_seed``, which seeds every device, to seed the host too. Needed by ``_set_random_seed``."""

    def manual_seed(seed: int) -> torch.Generator:
        _HOST.manual_seed(int(seed))
        return original(seed)

    return manual_seed


def draw_on_host(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap ``DataLoader.__iter__`` so that the seed of its workers is drawn from the host's generator.

    Needed by ``build_train_valid_test_data_iterators``, which runs after ``load_checkpoint`` restored the device's.
    """

    def __iter__(loader: Any) -> Any:
        device = torch.default_generator.get_state()
        torch.default_generator.set_state(_HOST.get_state())
        try:
            return original(loader)
        finally:
            _HOST.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(device)

    return __iter__


def device_state(device: Any = "cuda") -> torch.Tensor:
    """``torch.cuda.get_rng_state``, uint8. Needed by ``CudaRNGStatesTracker.add`` and ``save_checkpoint``."""
    return torch.default_generator.get_state()


def device_state_of_tracker(device: Any = "cuda") -> torch.Tensor:
    """``torch.cuda.random.get_rng_state``: the same by the name that ``_get_cuda_rng_state`` uses."""
    return torch.default_generator.get_state()


def set_device_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    """``torch.cuda.set_rng_state``. Needed by ``load_checkpoint``; stock torch queues the call until CUDA starts."""
    torch.default_generator.set_state(new_state)


def set_device_state_of_tracker(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    """``megatron.core.tensor_parallel.random:_set_cuda_rng_state``.

    Needed by ``CudaRNGStatesTracker.fork``. The original hands a callback to its own ``_lazy_call``, bound when the
    module was imported, and that one queues it until CUDA starts. ``graph_safe`` states need CUDA graphs.
    """
    torch.default_generator.set_state(new_state)


def seed_device(seed: int) -> None:
    """``torch.cuda.manual_seed``. Needed by ``model_parallel_cuda_manual_seed``; stock torch queues the call."""
    torch.default_generator.manual_seed(int(seed))


PATCHES = (
    Patch(
        target="torch:get_rng_state",
        kind="replace",
        new=host_state,
        why="else the tracker warns at every dropout that the CPU state changed within a GPU context",
    ),
    Patch(
        target="torch:set_rng_state",
        kind="replace",
        new=set_host_state,
        why="else restoring the host's state (recomputation, resume) overwrites the device's",
    ),
    Patch(
        target="torch:manual_seed",
        kind="wrap",
        new=seed_both,
        why="else seeding leaves the host's generator where it was",
    ),
    Patch(
        target="torch.utils.data:DataLoader.__iter__",
        kind="wrap",
        new=draw_on_host,
        why="else the start of the data loaders moves the device's generator and resume changes dropout",
    ),
    Patch(
        target="torch.cuda:get_rng_state",
        kind="replace",
        new=device_state,
        why="the tracker and the checkpoint read the device's state, which starts CUDA",
    ),
    Patch(
        target="torch.cuda.random:get_rng_state",
        kind="replace",
        new=device_state_of_tracker,
        why="the tracker's fork reads the device's state by this name, which starts CUDA",
    ),
    Patch(
        target="torch.cuda:set_rng_state",
        kind="replace",
        new=set_device_state,
        why="without CUDA the stock call is queued for ever, so resume would not restore dropout",
    ),
    Patch(
        target="megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        kind="replace",
        new=set_device_state_of_tracker,
        why="without CUDA the stock call is queued for ever, so all ranks would draw the same weights",
        parameters=("new_state", "device", "graph_safe"),
    ),
    Patch(
        target="torch.cuda:manual_seed",
        kind="replace",
        new=seed_device,
        why="without CUDA the stock call is queued for ever, so the tracker's states would all be equal",
    ),
)
