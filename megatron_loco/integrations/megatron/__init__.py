"""LoCo in Megatron-core: :func:`patch` installs it, the handle that it returns removes it."""

from __future__ import annotations

from megatron_loco.config import LoCoConfig
from megatron_loco.integrations.megatron.seams import seam_patches, supported_release
from megatron_loco.patching import PatchHandle, apply


def patch(config: LoCoConfig | None = None, *, allow_unknown_source: bool = False) -> PatchHandle:
    """Put LoCo into Megatron-core in this process; call it before the training script's ``main`` runs.

    Args:
        config: Settings for programs that do not use Megatron's command line. Default: what ``--loco-*`` says, and
            without ``--loco-bits`` the run stays bitwise the stock one.
        allow_unknown_source: Install although the installed Megatron differs from the releases that were tested.

    Returns:
        A handle whose ``remove()`` restores Megatron; also a context manager. While patches are in place, another call
        with the same ``config`` returns the handle that exists.

    Raises:
        RuntimeError: the release is not supported, or a seam does not fit (:class:`megatron_loco.patching.SeamError`,
            which lists every mismatch); or patches with another ``config`` are in place.
    """
    global _installed
    if _installed and _installed[0].targets:
        handle, installed_config = _installed
        if config != installed_config:
            raise RuntimeError(f"LoCo is installed with {installed_config}; call remove() on its handle first")
        return handle
    supported_release(allow_unknown_source)
    handle = apply(seam_patches(config), allow_unknown_source=allow_unknown_source)
    _installed = (handle, config)
    return handle


# A training script that calls patch() itself may be started by a launcher that did so already.
_installed: tuple[PatchHandle, LoCoConfig | None] | None = None

__all__ = ["patch"]
