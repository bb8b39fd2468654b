"""Choice of a backend by name and device."""

from __future__ import annotations

import torch

from megatron_loco.kernels.reference import ReferenceBackend
from megatron_loco.kernels.schema import Backend

_BACKENDS: dict[str, type[Backend]] = {"reference": ReferenceBackend}
_AUTO = {"cpu": "reference", "cuda": "reference"}


def select_backend(name: str, device: torch.device) -> Backend:
    """Return the backend called ``name``, or for ``auto`` the fastest one for ``device``.

    Raises:
        ValueError: no such backend, or none for the device.
    """
    if name == "auto":
        if device.type not in _AUTO:
            raise ValueError(f"--loco-backend auto: no backend for device {device.type}; name one explicitly")
        name = _AUTO[device.type]
    if name not in _BACKENDS:
        raise ValueError(f"--loco-backend must be one of {', '.join(sorted(_BACKENDS))}, got {name!r}")
    return _BACKENDS[name]()
