"""Text as byte tokens in Megatron's ``.bin``/``.idx`` format: nothing to train, to download, or to be unknown."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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
        tokens: Tokens: the bytes and one end per document.
        sha256: Digest of the tokens as they lie in the ``.bin`` file.
        entropy_nats: Entropy of single tokens in nats: the loss of a model that knows only how frequent each token is.
        index_bytes: Size of the ``.idx`` file.
    """

    documents: int
    bytes: int
    tokens: int
    sha256: str
    entropy_nats: float
    index_bytes: int


def write(texts: Iterable[str], prefix: Path) -> Written:
    """Write documents as tokens 0..255 = the bytes of UTF-8 and 256 = end of document.

    Args:
        texts: The documents.
        prefix: Path of the two files without their ending.

    Returns:
        Sizes, digest and entropy.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    counts = np.zeros(VOCAB_SIZE, dtype=np.int64)
    digest = hashlib.sha256()
    for text in texts:
        data = np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)
        tokens = np.append(data, EOD).astype("<u2")
        builder.add_document(tokens, [len(tokens)])
        counts += np.bincount(tokens, minlength=VOCAB_SIZE)
        digest.update(tokens.tobytes())
    builder.finalize(f"{prefix}.idx")
    return Written(
        documents=int(counts[EOD]),
        bytes=int(counts[:EOD].sum()),
        tokens=int(counts.sum()),
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
