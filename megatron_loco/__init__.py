"""megatron_loco: 4-bit gradient communication with error feedback for Megatron-LM.

Importing it patches nothing and needs neither Megatron nor Triton nor a GPU. ``patch()`` puts LoCo into Megatron-core
in this process; ``LoCoConfig`` holds the settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_loco.config import LoCoConfig

if TYPE_CHECKING:
    from megatron_loco.patching import PatchHandle

__version__ = "0.1.0"
__all__ = ["LoCoConfig", "__version__", "patch"]


def patch(config: LoCoConfig | None = None, *, allow_unknown_source: bool | None = None) -> PatchHandle:
    """Put LoCo into Megatron-core; see :func:`megatron_loco.integrations.megatron.patch`."""
    from megatron_loco.integrations.megatron import patch as patch_megatron

    return patch_megatron(config, allow_unknown_source=allow_unknown_source)
