"""Fixtures of the launcher's tests: a configuration file from text, and Megatron's flags, read once."""

from __future__ import annotations

import socket
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_loco.launch import stdlib_text
from megatron_loco.launch.megatron_flags import MegatronFlags


@pytest.fixture(scope="session")
def flags() -> MegatronFlags:
    return MegatronFlags.load()


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], str]:
    def write(content: str) -> str:
        path = tmp_path / "small.yaml"
        path.write_text(textwrap.dedent(content), encoding="utf-8")
        return str(path)

    return write


LONG = "A docstring that is long enough to be a document, which takes at least eighty characters in all."


@pytest.fixture
def tiny_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of two files, with one topic."""
    library = tmp_path / "library"
    (library / "package" / "test").mkdir(parents=True)
    (library / "first.py").write_text(f'"""{LONG}"""\ndef f():\n    """Short."""\n', encoding="utf-8")
    (library / "package" / "second.py").write_text(
        f'class C:\n    """C. {LONG}"""\n    async def g(self):\n        """\u00fc {LONG}"""\n', encoding="utf-8"
    )
    (library / "package" / "test" / "hidden.py").write_text(f'"""Test. {LONG}"""\n', encoding="utf-8")
    (library / "broken.py").write_text("def (:\n", encoding="utf-8")
    monkeypatch.setattr(stdlib_text, "library_folder", lambda: library)
    monkeypatch.setattr(stdlib_text, "topics", lambda: {"b": "Topic.", "a": "Topic.", "empty": " "})
    return library


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port on which another process listens."""
    with socket.create_server(("", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Returns a port of this machine on which nobody listens."""

    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    return find
