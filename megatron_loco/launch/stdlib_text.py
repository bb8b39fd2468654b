"""Python's own documentation as plain text: real English with nothing to download, the same bytes for one Python.

It is what every Python installation carries: the topics of ``help()`` and the docstrings of the standard library. The
sources are read with ``ast``, nothing is imported, so that no module of the standard library runs.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import warnings
from collections.abc import Mapping
from pathlib import Path

SOURCE = "pydoc_data.topics and docstrings of the Python standard library"
LICENCE = "PSF-2.0"

MIN_DOCSTRING_CHARS = 80
"""Shorter ones are mostly headings of functions; they would only teach the model to end early."""

SHUFFLE_SEED = 1234
"""Megatron's ``--split`` takes documents in order, so without shuffling the validation split would be other modules."""

_SKIPPED_FOLDERS = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"})
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def library_folder() -> Path:
    """The folder of the standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def topics() -> Mapping[str, str]:
    """The topics of ``help()``, by name."""
    from pydoc_data.topics import topics as texts

    return dict(texts)


def source_files(folder: Path) -> list[Path]:
    """Return the sources of the standard library, sorted, without tests and installed packages.

    Args:
        folder: The folder of the standard library.

    Returns:
        Paths of the ``.py`` files.
    """
    files = []
    for path, folders, names in folder.walk():
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        files += [path / name for name in names if name.endswith(".py")]
    return sorted(files)


def documents(folder: Path) -> list[str]:
    """Read the corpus.

    Args:
        folder: The folder of the standard library.

    Returns:
        Distinct texts in a fixed shuffled order; a text that occurs twice could be in both splits.
    """
    texts = [text for _, text in sorted(topics().items())]
    for path in source_files(folder):
        texts += _docstrings(path)
    distinct = list(dict.fromkeys(text for text in texts if text.strip()))
    random.Random(SHUFFLE_SEED).shuffle(distinct)
    return distinct


def parse(path: Path) -> ast.Module | None:
    """Return the syntax tree of a source, or ``None`` for templates and encodings that this Python does not read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes such as "\d" in some sources
            return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return None


def _docstrings(path: Path) -> list[str]:
    tree = parse(path)
    if tree is None:
        return []
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, _DOCUMENTED))
    return [text for text in found if text is not None and len(text) >= MIN_DOCSTRING_CHARS]
