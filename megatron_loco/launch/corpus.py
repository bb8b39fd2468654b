"""Prepared corpora: texts or conversations as byte tokens in Megatron's ``.bin``/``.idx`` format, written once, reused.

One folder per content, ``<data_dir>/<name>-py<version>-v<format>-<sha256>``: ``text_document.bin`` and ``.idx``,
``corpus.json`` with the facts, and ``cache`` for Megatron's own index files. A folder appears under its name only when
it is complete.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from megatron_loco.launch import byte_tokens, chat_tokens, stdlib_chat, stdlib_text
from megatron_loco.launch.megatron_flags import quiet
from megatron_loco.launch.values import Value

CORPORA = {"stdlib": "text", "stdlib-chat": "chat"}
"""Names, and the ``run.data_format`` of each."""

_SOURCES = {"text": stdlib_text.SOURCE, "chat": stdlib_chat.SOURCE}
_VOCAB_SIZES = {"text": byte_tokens.VOCAB_SIZE, "chat": chat_tokens.VOCAB_SIZE}

FORMAT_VERSION = 1
"""Raise it when documents, their order or the tokens change, so that old folders are not reused."""


@dataclass(frozen=True, kw_only=True)
class PreparedCorpus:
    """A corpus on disk.

    Attributes:
        name: Its name.
        folder: Where it lies.
        documents, bytes, tokens, sha256, entropy_nats, index_bytes: See :class:`~.byte_tokens.Written`.
        source: What the text is.
        licence: Its licence.
        python_version: The Python whose documentation it is.
        fingerprint: Digest of names and sizes of the source files, to recognise them without reading them.
    """

    name: str
    folder: str
    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    sha256: str = ""
    entropy_nats: float = 0.0
    source: str = ""
    licence: str = ""
    python_version: str = ""
    fingerprint: str = ""
    index_bytes: int = 0

    @classmethod
    def unprepared(cls, name: str, data_dir: str | Path) -> PreparedCorpus:
        """Stand for a corpus that is prepared later, to check and show settings; its folder is not known yet."""
        return cls(name=name, folder=str(Path(data_dir, f"{name}-(prepared at the start)")))

    @property
    def data_format(self) -> str:
        """``text`` or ``chat``, as in ``run.data_format``."""
        return CORPORA[self.name]

    def megatron_settings(self) -> dict[str, Value]:
        """Megatron's flags for training on this corpus, without dashes."""
        return {
            "tokenizer-type": "NullTokenizer",
            "vocab-size": _VOCAB_SIZES[self.data_format],
            "data-path": str(Path(self.folder, "text_document")),
            "data-cache-path": str(Path(self.folder, "cache")),
        }

    def is_complete(self) -> bool:
        """Whether the files have the sizes that were written."""
        expected = {"bin": self.tokens * byte_tokens.TOKEN_BYTES, "idx": self.index_bytes}
        files = {suffix: Path(self.folder, f"text_document.{suffix}") for suffix in expected}
        return all(files[suffix].is_file() and files[suffix].stat().st_size == expected[suffix] for suffix in expected)


def find(name: str, data_dir: str | Path) -> PreparedCorpus | None:
    """Look for a corpus that is already prepared from the text of this Python.

    Args:
        name: The corpus.
        data_dir: Folder of prepared corpora.

    Returns:
        The corpus, or ``None``. It may be damaged; see :meth:`PreparedCorpus.is_complete`.

    Raises:
        ValueError: there is no corpus of that name.
    """
    _check_name(name)
    fingerprint = _fingerprint(stdlib_text.library_folder())
    for folder in sorted(Path(data_dir).glob(f"{_prefix(name)}-*")):
        corpus = _read(folder)
        if corpus is not None and corpus.fingerprint == fingerprint:
            return corpus
    return None


def prepare(name: str, data_dir: str | Path) -> PreparedCorpus:
    """Return a corpus, written now or found from an earlier call.

    Args:
        name: The corpus.
        data_dir: Folder of prepared corpora; made if it does not exist.

    Returns:
        The corpus.

    Raises:
        ValueError: there is no corpus of that name.
    """
    found = find(name, data_dir)
    if found is not None and found.is_complete():
        print(f"corpus {name}: reusing {found.folder} ({found.documents:,} documents, {found.tokens:,} tokens)")
        return found
    source = _SOURCES[CORPORA[name]]
    print(f"corpus {name}: reading {source}", flush=True)
    start = time.perf_counter()
    library = stdlib_text.library_folder()
    building = Path(data_dir, f".preparing-{uuid.uuid4().hex}")  # several nodes may prepare in one shared folder
    building.mkdir(parents=True)
    try:
        with quiet():
            written = _write(name, library, building / "text_document")
        built = PreparedCorpus(
            name=name,
            folder=str(building),
            source=source,
            licence=stdlib_text.LICENCE,
            python_version=platform.python_version(),
            fingerprint=_fingerprint(library),
            **dataclasses.asdict(written),
        )
        corpus = _move_into_place(built, building, Path(data_dir, f"{_prefix(name)}-{built.sha256[:12]}"))
    finally:
        shutil.rmtree(building, ignore_errors=True)
    seconds = time.perf_counter() - start
    size = f"{corpus.documents:,} documents, {corpus.bytes / 1e6:.2f} MB, {corpus.tokens:,} tokens"
    print(f"corpus {name}: {size}, entropy {corpus.entropy_nats:.3f} nats per token")
    print(f"corpus {name}: in {corpus.folder} after {seconds:.1f} s", flush=True)
    return corpus


def _write(name: str, library: Path, prefix: Path) -> byte_tokens.Written:
    if CORPORA[name] == "text":
        return byte_tokens.write(stdlib_text.documents(library), prefix)
    conversations = (chat_tokens.encode([pair]) for pair in stdlib_chat.pairs(library))
    return byte_tokens.write_tokens(conversations, prefix, chat_tokens.is_counted)


def _move_into_place(built: PreparedCorpus, building: Path, target: Path) -> PreparedCorpus:
    facts = {key: value for key, value in dataclasses.asdict(built).items() if key != "folder"}
    (building / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    corpus = dataclasses.replace(built, folder=str(target))
    if target.exists() and not (corpus.is_complete() and _read(target) == corpus):
        print(f"corpus {built.name}: {target} does not match its corpus.json, rebuilding it")
        shutil.rmtree(target)
    try:
        building.rename(target)
    except OSError:
        if not corpus.is_complete():  # else another process was faster, with the same content
            raise
    return corpus


def _read(folder: Path) -> PreparedCorpus | None:
    try:
        facts = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
        return PreparedCorpus(folder=str(folder), **facts)
    except (OSError, ValueError, TypeError):
        return None  # no corpus, or one that an earlier version wrote otherwise


def _check_name(name: str) -> None:
    if name not in CORPORA:
        raise ValueError(f"unknown corpus {name!r} (known: {', '.join(CORPORA)})")


def _prefix(name: str) -> str:
    return f"{name}-py{platform.python_version()}-v{FORMAT_VERSION}"


def _fingerprint(library: Path) -> str:
    lines = [f"{path.relative_to(library)} {path.stat().st_size}" for path in stdlib_text.source_files(library)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
