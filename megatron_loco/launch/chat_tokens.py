"""Conversations as tokens: bytes, two role tokens, and an end; and which of them a model is trained to say.

A conversation is one document, ``USER question ASSISTANT answer END`` and so on for further turns. Roles are tokens of
their own beyond the bytes, so that no text can pretend to be one, and the loss mask follows from the tokens alone:
there is no second file that could be out of step.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from megatron_loco.launch import byte_tokens

END = byte_tokens.EOD
"""End of an answer; what ends a document in pretraining, so that a base model knows it."""

USER = END + 1
ASSISTANT = END + 2
VOCAB_SIZE = END + 3
"""Megatron pads it to as many rows as the vocabulary of bytes, so that a base model's checkpoint loads."""


def encode(turns: Iterable[tuple[str, str]]) -> NDArray[np.uint16]:
    """Encode a conversation.

    Args:
        turns: Pairs of question and answer.

    Returns:
        The tokens of the document.
    """
    words = []
    for question, answer in turns:
        words += [USER, *byte_tokens.encode(question), ASSISTANT, *byte_tokens.encode(answer), END]
    return np.array(words, dtype=np.uint16)


def is_counted(tokens: NDArray[np.uint16]) -> NDArray[np.bool_]:
    """Return which tokens the assistant says: those behind an ASSISTANT, to its END, which counts too.

    Args:
        tokens: A conversation from its beginning; it may be cut off at its end.

    Returns:
        One value per token; role tokens never count.
    """
    is_control = tokens >= END
    last_control = np.maximum.accumulate(np.where(is_control, np.arange(len(tokens)), -1))
    before = np.concatenate(([-1], last_control[:-1]))  # of each token, the control token that it follows
    follows_assistant = (before >= 0) & (tokens[before] == ASSISTANT)
    counted: NDArray[np.bool_] = follows_assistant & (tokens != USER) & (tokens != ASSISTANT)
    return counted
