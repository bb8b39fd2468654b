"""Which processes a run has left behind."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path


def processes_with(mark: str) -> list[str]:
    """Command lines of all processes that inherited a variable, whoever their parent is by now."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def gone(mark: str) -> list[str]:
    """What is left of a run; its helpers may take a moment to notice its end."""
    for _ in range(100):
        if not processes_with(mark):
            return []
        time.sleep(0.1)
    return processes_with(mark)
