"""The sections of a configuration file, the spelling of their keys, and the nearest valid name to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MEGATRON_SECTIONS = ("model", "data", "training", "parallel", "precision", "checkpoint", "logging")
"""They only group: any Megatron flag may stand in any of them, without its leading dashes."""

SECTIONS = ("run", "env", "loco", *MEGATRON_SECTIONS)
"""``run``: the launcher's own settings. ``env``: environment variables of the ranks. ``loco``: fields of LoCoConfig."""


def canonical(section: str, key: str) -> str:
    """The one spelling of a key: Megatron flags with dashes, our own fields with underscores, variables as they are."""
    if section == "env":
        return key
    return key.replace("_", "-") if section in MEGATRON_SECTIONS else key.replace("-", "_")


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return ``"; did you mean X?"`` for the valid name nearest to ``name``, or an empty text if none is near."""
    close = difflib.get_close_matches(name, list(valid), n=1)
    return f"; did you mean {close[0]}?" if close else ""
