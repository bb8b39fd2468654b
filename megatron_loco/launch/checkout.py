"""The Megatron-LM checkout in MEGATRON_LM_DIR: its training scripts, and its Megatron in place of the installed one."""

from __future__ import annotations

import importlib.util
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path, PurePath

OWN_SCRIPT = "pretrain_gpt.py"
"""The script of a checkout that :mod:`megatron_loco.launch.pretrain_gpt` does the work of where there is none."""


def training_script(environment: Mapping[str, str], name: str = OWN_SCRIPT) -> Path | None:
    """Return the training script of the checkout in MEGATRON_LM_DIR, or ``None`` where that is not set.

    Args:
        environment: Environment variables of the ranks.
        name: ``run.script``, a path inside the checkout.

    Returns:
        The script; ``None`` leaves the work to the entry point's own one.

    Raises:
        ValueError: MEGATRON_LM_DIR is not a folder with that file, or it is not set and our own script is not enough.
    """
    folder = environment.get("MEGATRON_LM_DIR")
    if not folder:
        if PurePath(name) != PurePath(OWN_SCRIPT):
            raise ValueError(f"run.script is {name}: set MEGATRON_LM_DIR to the Megatron-LM checkout that has it")
        return None
    script = Path(folder) / name
    if not script.is_file():
        raise ValueError(f"MEGATRON_LM_DIR: {folder} is not a Megatron-LM checkout with that script (no file {script})")
    return script


def prefer_megatron_of(script: Path) -> None:
    """Import from now on what lies beside ``script``, first of all its Megatron, as ``python SCRIPT`` would.

    A folder without ``megatron/core`` uses the installed one.

    Args:
        script: A training script.

    Raises:
        ValueError: there is a Megatron beside the script, but another one comes first or is imported already.
    """
    folder = script.resolve().parent
    sys.path.insert(0, str(folder))
    core = folder / "megatron" / "core"
    if not core.is_dir():
        return
    found = importlib.util.find_spec("megatron.core")
    if found is None or found.origin is None or Path(found.origin).resolve().parent != core.resolve():
        origin = found.origin if found else None
        raise ValueError(
            f"MEGATRON_LM_DIR: megatron.core comes from {origin} and not from {core}; is another one imported or a "
            "package named megatron installed?"
        )


def check_script(args: Namespace, script: Path | None) -> None:
    """Refuse a hybrid model with the script for GPT, which would train something else.

    Args:
        args: Megatron's parsed arguments.
        script: The training script, or ``None`` for our own.

    Raises:
        ValueError: with the script to use.
    """
    if getattr(args, "hybrid_layer_pattern", None) and (script is None or script.name == OWN_SCRIPT):
        raise ValueError(
            "hybrid-layer-pattern: pretrain_gpt.py does not build hybrid models; set run.script=pretrain_hybrid.py, "
            "and MEGATRON_LM_DIR to a Megatron-LM checkout, 0.18 or newer"
        )
