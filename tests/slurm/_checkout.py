"""A checkout to submit jobs from."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def make_checkout(parent: Path) -> Path:
    """The checkout, but its bootstrap answers with this Python, and notes each call in ``bootstraps``."""
    folder = parent / "check out"  # spaces have to survive
    (folder / "scripts").mkdir(parents=True)
    for name in ("configs", "megatron_loco", "scripts/slurm"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "scripts" / "bootstrap.sh").write_text(f"echo >> bootstraps\necho {shlex.quote(sys.executable)}\n")
    return folder
