"""Megatron's data files: are they there, do ``.bin`` and ``.idx`` fit together, do the tokens fit the vocabulary."""

from __future__ import annotations

import json
import struct
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_HEADER = struct.Struct("<9sQBQQ")
"""Start of an ``.idx`` file: magic, version, type of a token, number of sequences, number of documents + 1."""
_MAGIC = b"MMIDIDX\x00\x00"
_SAMPLE_TOKENS = 1 << 24
"""Tokens that are looked at in all, 32 or 64 MB: a few tenths of a second, from a disk too."""
_BLOCK_TOKENS = 1 << 16
_UINT16_VOCABULARY = 65500
"""Megatron's tools write smaller vocabularies in 16 bits, and larger ones in 32."""


@dataclass(frozen=True)
class TokenFile:
    """A ``.bin`` file, as its index describes it.

    Attributes:
        path: The file.
        dtype: Of a token.
        num_tokens: In the file.
    """

    path: Path
    dtype: np.dtype[Any]
    num_tokens: int


def check_data(args: Namespace, vocabulary: int | None) -> list[str]:
    """Check every data file that the arguments name.

    Args:
        args: Megatron's parsed arguments.
        vocabulary: Tokens of the tokenizer, or ``None`` if that is not known.

    Returns:
        Warnings.

    Raises:
        ValueError: there are no data, a file is missing or damaged, or holds tokens beyond the embedding.
    """
    if args.mock_data or args.dataloader_type == "external" or args.perform_rl_step:
        return []
    sources = _sources(args)
    if not sources:
        # Megatron would make data up without a word, or stop much later.
        raise ValueError("there are no data: set data-path, run.corpus=stdlib, or mock-data=true for made-up tokens")
    warnings: list[str] = []
    files: list[tuple[str, TokenFile]] = []
    for flag, prefixes in sources.items():
        for prefix in dict.fromkeys(prefixes):
            if "://" in prefix:
                continue
            if args.sft:  # reads JSON lines instead
                if not Path(prefix).exists():
                    raise ValueError(f"{flag}: {_missing(Path(prefix))}")
                continue
            file = _read_index(flag, prefix, warnings)
            files.append((flag, file))
    if vocabulary is not None and files:
        warnings += _check_tokens(args, files, vocabulary)
    return warnings


def _sources(args: Namespace) -> dict[str, list[str]]:
    from megatron.core.datasets.utils import get_blend_from_list

    lists = {"data-path": args.data_path}
    for split in ("train", "valid", "test"):
        lists[f"{split}-data-path"] = getattr(args, f"{split}_data_path")
    if args.data_args_path is not None:
        lists["data-args-path"] = _read(args.data_args_path, "data-args-path").split()
    if args.per_split_data_args_path is not None:
        flag = "per-split-data-args-path"
        try:
            per_split = json.loads(_read(args.per_split_data_args_path, flag))
            for split in ("train", "valid", "test"):
                value = per_split[split]
                lists[f"{flag} ({split})"] = value.split() if isinstance(value, str) else value
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError):
                raise
            raise ValueError(
                f"{flag}: {args.per_split_data_args_path} must be JSON with lists train, valid and test"
            ) from None
    # An odd number of words are paths, an even number weights and paths in turn: Megatron's rule.
    return {flag: list(get_blend_from_list(words)[0]) for flag, words in lists.items() if words}


def _read(file: str, flag: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag}: {file} cannot be read: {getattr(error, 'strerror', error)}") from None


def _read_index(flag: str, prefix: str, warnings: list[str]) -> TokenFile:
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for file in (index, tokens):
        if not file.is_file():
            raise ValueError(f"{flag}: {_missing(file)}")
    again = "write both files again"
    try:
        with index.open("rb") as stream:
            start = stream.read(_HEADER.size)
            if len(start) < _HEADER.size or not start.startswith(_MAGIC):
                raise ValueError(f"{flag}: {index} is not an index of Megatron's; {again} with its preprocess_data.py")
            _, version, code, num_sequences, num_documents = _HEADER.unpack(start)
            size = _HEADER.size + num_sequences * 12 + num_documents * 8
            # Indices of several modalities have one more byte per sequence.
            if version != 1 or index.stat().st_size not in (size, size + num_sequences):
                raise ValueError(f"{flag}: {index} is cut short or damaged; {again}")
            if num_sequences == 0:
                raise ValueError(f"{flag}: {index} holds no documents; {again}")
            stream.seek(_HEADER.size + (num_sequences - 1) * 4)
            (last_length,) = struct.unpack("<i", stream.read(4))
            stream.seek(_HEADER.size + num_sequences * 12 - 8)
            (last_start,) = struct.unpack("<q", stream.read(8))
        found = tokens.stat().st_size
    except OSError as error:
        raise ValueError(f"{flag}: {error.filename or index} cannot be read: {error.strerror}") from None
    dtype = _dtype(code, flag, index)
    expected = last_start + last_length * dtype.itemsize
    if found < expected:
        raise ValueError(f"{flag}: {tokens} has {found:,} bytes, its index says {expected:,}: cut short; {again}")
    if found > expected:
        warnings.append(f"{flag}: {tokens} has {found:,} bytes, its index says {expected:,}: the rest is not used")
    return TokenFile(tokens, dtype, expected // dtype.itemsize)


def _missing(file: Path) -> str:
    problem = f"there is no file {file}"
    if " " in str(file).strip():
        return f"{problem}; several paths are written as a list: [0.3, first/path, 0.7, second/path]"
    if not file.parent.is_dir():
        return f"{problem} (nor a folder {file.parent}, seen from {Path.cwd()})"
    if file.suffix in (".idx", ".bin") and file.with_suffix("").exists():
        return f"{problem}; name the files without .bin and .idx, as Megatron does"
    return f"{problem}; a path names the pair PATH.bin and PATH.idx, which Megatron's preprocess_data.py writes"


def _dtype(code: int, flag: str, index: Path) -> np.dtype[Any]:
    from megatron.core.datasets.indexed_dataset import DType

    try:
        dtype: np.dtype[Any] = np.dtype(DType.dtype_from_code(code))
    except ValueError:
        dtype = np.dtype(np.float64)
    if dtype.kind not in "iu":
        raise ValueError(f"{flag}: {index} says that its tokens are no whole numbers (code {code})")
    return dtype


def _check_tokens(args: Namespace, files: Sequence[tuple[str, TokenFile]], vocabulary: int) -> list[str]:
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    rows = getattr(args, "padded_vocab_size", None) or -(-vocabulary // multiple) * multiple
    wrong = "were these data written with another tokenizer?"
    warnings = []
    for flag, file in files:
        largest = _largest_token(file, max(_BLOCK_TOKENS, _SAMPLE_TOKENS // len(files)))
        holds = f"{flag}: {file.path} holds"
        if largest >= rows:
            problem = f"{holds} the token {largest}, but the embedding has {rows} rows for a vocabulary of {vocabulary}"
            raise ValueError(f"{problem}: {wrong}")
        if largest >= vocabulary:
            warnings.append(f"{holds} the token {largest}, but the vocabulary ends at {vocabulary - 1}: {wrong}")
        elif vocabulary >= _UINT16_VOCABULARY and file.dtype.itemsize == 2:
            warnings.append(f"{holds} 16-bit tokens, too small for a vocabulary of {vocabulary}: {wrong}")
    return warnings


def _largest_token(file: TokenFile, budget: int) -> int:
    """Of the whole file, or of blocks all over it."""
    tokens = np.memmap(file.path, dtype=file.dtype, mode="r", shape=(file.num_tokens,))
    if file.num_tokens <= budget:
        return int(tokens.max())
    starts = np.linspace(0, file.num_tokens - _BLOCK_TOKENS, budget // _BLOCK_TOKENS, dtype=np.int64)
    return max(int(tokens[start : start + _BLOCK_TOKENS].max()) for start in starts)
