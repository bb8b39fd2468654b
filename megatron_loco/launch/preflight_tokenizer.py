"""The tokenizer: are its package and files there, and how large is its vocabulary where that is quick to tell."""

from __future__ import annotations

import importlib.util
import json
from argparse import Namespace
from pathlib import Path

_SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_HUGGING_FACE = ("HuggingFaceTokenizer", "SFTTokenizer")
_PACKAGES = {
    **dict.fromkeys(_SENTENCEPIECE, "sentencepiece"),
    **dict.fromkeys((*_HUGGING_FACE, "GPT2BPETokenizer"), "transformers"),
    **dict.fromkeys(("BertWordPieceLowerCase", "BertWordPieceCase", "MultimodalTokenizer"), "transformers"),
    "TikTokenizer": "tiktoken",
}
"""``tokenizer-type`` -> the package that Megatron builds it with."""


def check_tokenizer(args: Namespace, tokenizer_type: str | None) -> None:
    """Look for the tokenizer's package and files.

    Args:
        args: Megatron's parsed arguments.
        tokenizer_type: The type that the training script takes; ``None`` if only it knows.

    Raises:
        ValueError: a package is not installed, a file is missing, or the type lacks a setting.
    """
    package = _PACKAGES.get(tokenizer_type or "")
    if package is not None and importlib.util.find_spec(package) is None:
        raise ValueError(f"tokenizer-type {tokenizer_type} needs the package {package}: pip install {package}")
    if tokenizer_type == "NullTokenizer" and args.vocab_size is None:
        raise ValueError("tokenizer-type NullTokenizer has no vocabulary of its own: set vocab-size")
    if tokenizer_type in (*_SENTENCEPIECE, *_HUGGING_FACE, "TikTokenizer"):
        _check_model(args.tokenizer_model, tokenizer_type)
    for key in ("vocab_file", "merge_file"):
        file = getattr(args, key)
        if file is not None and "://" not in file and not Path(file).is_file():
            raise ValueError(f"{key.replace('_', '-')}: there is no file {file}")


def vocabulary_size(args: Namespace, tokenizer_type: str | None) -> int | None:
    """Return the number of tokens that the tokenizer knows.

    Args:
        args: Megatron's parsed arguments, which :func:`check_tokenizer` has accepted.
        tokenizer_type: The type that the training script takes.

    Returns:
        The number, or ``None`` where only building the tokenizer would tell.
    """
    if tokenizer_type in ("NullTokenizer", "TikTokenizer"):
        size: int | None = args.vocab_size
        return size
    model = Path(args.tokenizer_model or "")
    if tokenizer_type in _SENTENCEPIECE and model.is_file():
        import sentencepiece

        return int(sentencepiece.SentencePieceProcessor(model_file=str(model)).vocab_size())
    if tokenizer_type in _HUGGING_FACE and (model / "tokenizer.json").is_file():
        return _largest_id(model / "tokenizer.json")
    return None


def _check_model(model: str | None, tokenizer_type: str | None) -> None:
    if not model:
        raise ValueError(f"tokenizer-type {tokenizer_type} needs tokenizer-model: set it to the tokenizer's files")
    if "://" in model or Path(model).exists():
        return
    is_path = model.startswith(("/", ".", "~")) or model.count("/") > 1
    if tokenizer_type in _HUGGING_FACE and not is_path:  # the name of a repository, which may be in a cache
        return
    raise ValueError(f"tokenizer-model: {model} does not exist; set it to the files of a {tokenizer_type}")


def _largest_id(file: Path) -> int | None:
    # The file alone: importing transformers would take seconds.
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
        ids += [token["id"] for token in content.get("added_tokens", ())]
        return 1 + max(int(number) for number in ids)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # of a kind that is not known here; the ranks will read it
