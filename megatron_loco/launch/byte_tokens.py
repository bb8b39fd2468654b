"""Text as byte tokens in Megatron's ``.bin``/``.idx`` format: nothing to train, to download, or to be unknown."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

VOCAB_SIZE = 257
EOD = 256
"""Megatron's NullTokenizer takes the last token of the vocabulary for the end of a document."""

TOKEN_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class Written:
    """What was written.

    Attributes:
        documents: Number of documents.
        bytes: Bytes of text, UTF-8.
        tokens: Tokens: the bytes, one end per document, and roles where there are any.
        sha256: Digest of the tokens as they lie in the ``.bin`` file.
        entropy_nats: Entropy of single tokens that count in nats: the loss of a model that knows only how frequent each
            is.
        index_bytes: Size of the ``.idx`` file.
    """

    documents: int
    bytes: int
    tokens: int
    sha256: str
    entropy_nats: float
    index_bytes: int


def encode(text: str) -> NDArray[np.uint8]:
    """Return the bytes of a text, which are its tokens."""
    return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)


def write(texts: Iterable[str], prefix: Path) -> Written:
    """Write documents as tokens 0..255 = the bytes of UTF-8 and 256 = end of document.

    Args:
        texts: The documents.
        prefix: Path of the two files without their ending.

    Returns:
        Sizes, digest and entropy.
    """
    return write_tokens((np.append(encode(text), EOD).astype(np.uint16) for text in texts), prefix)


def write_tokens(
    documents: Iterable[NDArray[np.uint16]],
    prefix: Path,
    is_counted: Callable[[NDArray[np.uint16]], NDArray[np.bool_]] | None = None,
) -> Written:
    """Write documents that are tokens already.

    Args:
        documents: Their tokens.
        prefix: Path of the two files without their ending.
        is_counted: Says which tokens of a document the loss is over, bytes and ends; ``None``: all.

    Returns:
        Sizes, digest and entropy.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    counts = np.zeros(EOD + 1, dtype=np.int64)
    digest = hashlib.sha256()
    num_documents = num_bytes = num_tokens = 0
    for tokens in documents:
        builder.add_document(tokens, [len(tokens)])
        num_documents += 1
        num_bytes += int((tokens < EOD).sum())
        num_tokens += len(tokens)
        counts += np.bincount(tokens if is_counted is None else tokens[is_counted(tokens)], minlength=EOD + 1)
        digest.update(tokens.astype("<u2").tobytes())
    builder.finalize(f"{prefix}.idx")
    return Written(
        documents=num_documents,
        bytes=num_bytes,
        tokens=num_tokens,
        sha256=digest.hexdigest(),
        entropy_nats=unigram_entropy(counts),
        index_bytes=Path(f"{prefix}.idx").stat().st_size,
    )


def unigram_entropy(counts: Sequence[int] | np.ndarray) -> float:
    """Return the entropy of a frequency table in nats.

    Args:
        counts: How often each token occurs; zeros are allowed, their sum is not zero.

    Returns:
        ``-sum(p * ln p)``.
    """
    frequencies = np.asarray(counts, dtype=np.float64)
    p = frequencies[frequencies > 0] / frequencies.sum()
    return float(-(p * np.log(p)).sum())
