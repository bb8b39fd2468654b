"""Folders that a run will write to: can they be made, can files be made in them, how much room do they have."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def check_folder(folder: str | Path, key: str) -> None:
    """Try what writing into a folder takes; nothing is left behind.

    A folder that does not exist is not made, since a run that is refused should leave no trace: its nearest parent is
    tried instead.

    Args:
        folder: The folder. One with ``://`` is an object store, and left aside.
        key: The setting that names it, for the message.

    Raises:
        ValueError: it is no folder, or cannot be made or written.
    """
    if "://" in str(folder):
        return
    existing = nearest_existing(folder)
    remedy = f"set {key} to a folder that this user can write to on every node"
    if not existing.is_dir():
        raise ValueError(f"{key}: {existing} is not a folder; {remedy}")
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        where = str(folder) if existing == Path(folder) else f"{folder} cannot be made in {existing}"
        raise ValueError(f"{key}: {where}: {error.strerror}; {remedy}") from None


def nearest_existing(folder: str | Path) -> Path:
    """The folder itself, or the nearest of its parents that exists."""
    path = Path(folder).absolute()
    return next((each for each in (path, *path.parents) if os.path.lexists(each)), Path("/"))


def free_bytes(folder: str | Path) -> int:
    """Room for files of this user on the file system of a folder, which need not exist yet."""
    stat = os.statvfs(nearest_existing(folder))
    return stat.f_bavail * stat.f_frsize
