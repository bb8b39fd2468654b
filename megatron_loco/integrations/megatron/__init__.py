"""LoCo in Megatron-core: :func:`patch` installs it, the handle that it returns removes it.

Importing it imports nothing of Megatron, whose own files import :func:`loco_seam` where they are patched statically.
"""

from __future__ import annotations

from megatron_loco.config import LoCoConfig
from megatron_loco.integrations.megatron import static
from megatron_loco.integrations.megatron.releases import (
    allow_by_variable,
    has_training,
    megatron_version,
    supported_release,
)
from megatron_loco.integrations.megatron.seams import Seams
from megatron_loco.integrations.megatron.static import loco_seam
from megatron_loco.patching import PatchHandle, SeamError


def patch(config: LoCoConfig | None = None, *, allow_unknown_source: bool | None = None) -> PatchHandle:
    """Put LoCo into Megatron-core in this process; call it before the training script's ``main`` runs.

    A Megatron that has been patched statically is left as it is, and gets ``config``.

    Args:
        config: Settings for programs that do not use Megatron's command line. Default: what ``--loco-*`` says, and
            without ``--loco-bits`` the run stays bitwise the stock one.
        allow_unknown_source: Install although Megatron differs from the releases that were tested. Default: what the
            environment says, ``MEGATRON_LOCO_ALLOW_UNKNOWN_SOURCE=1``.

    Returns:
        A handle whose ``remove()`` restores Megatron; also a context manager. While patches are in place, another call
        with the same ``config`` returns the handle that exists.

    Raises:
        RuntimeError: the release is not supported, or a seam does not fit (:class:`megatron_loco.patching.SeamError`,
            which lists every mismatch); or patches with another ``config`` are in place.
        ValueError: the environment variable has another value than 0 or 1.
    """
    global _installed
    if _installed and _installed[0].targets:
        handle, installed_config = _installed
        if config != installed_config:
            raise RuntimeError(f"LoCo is installed with {installed_config}; call remove() on its handle first")
        return handle
    allow = allow_by_variable() if allow_unknown_source is None else allow_unknown_source
    release, training = supported_release(megatron_version(), allow), has_training()
    if config is None and not training:
        raise SeamError(
            "this Megatron-core comes without megatron.training, so that there is no command line for --loco-bits: "
            "pass the settings, patch(LoCoConfig(bits=4))"
        )
    patches = Seams(config).patches(release, training=training)
    if static.is_static(patches):
        static.shared().check(allow)
        handle = static.StaticHandle(config)
    else:
        handle = static.install(patches, allow)
    _installed = (handle, config)
    return handle


# A training script that calls patch() itself may be started by a launcher that did so already.
_installed: tuple[PatchHandle, LoCoConfig | None] | None = None

__all__ = ["loco_seam", "patch"]
