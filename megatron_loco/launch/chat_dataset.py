"""Megatron's dataset for conversations: one per sample, and a loss on what the assistant says only."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from torch import Tensor

from megatron_loco.launch.chat_tokens import ASSISTANT, END, is_counted


class ChatDataset(MegatronDataset):  # type: ignore[misc]  # Megatron has no types
    """Samples of one conversation each, padded on the right; takes what :class:`GPTDataset` takes.

    Conversations are never joined in a sample: attention is causal and padding comes last, so nothing that counts sees
    another conversation. One that is longer than a sample loses its end. Every epoch has another order, which follows
    from the seed and the number of the sample, so that a resumed run goes on where it stopped.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._order: tuple[int, np.ndarray] | None = None

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Conversations; ``--split`` divides them."""
        return int(GPTDataset.numel_low_level_dataset(low_level_dataset))

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> Any:
        """Open the ``.bin`` and ``.idx`` files."""
        return GPTDataset.build_low_level_dataset(dataset_path, config)

    def __len__(self) -> int:
        return int(len(self.indices) if self.num_samples is None else self.num_samples)

    def __getitem__(self, idx: int | None) -> dict[str, Tensor]:
        """Return a sample.

        Args:
            idx: Its number; ``None`` is a sample that only fills a batch, in which no token counts.

        Returns:
            ``tokens``, ``labels`` (the tokens one further on), ``loss_mask`` (of the labels), ``position_ids``, and
            ``attention_mask`` if the loader makes it.

        Raises:
            ValueError: the document is no conversation.
        """
        length = self.config.sequence_length
        number = self._document(0 if idx is None else idx)
        document = self.dataset[number]
        if not (document == ASSISTANT).any():
            raise ValueError(
                f"{self.dataset_path}: document {number} holds no token {ASSISTANT}, so there is nothing to learn from "
                "it; --data-format chat reads what run.corpus=stdlib-chat writes"
            )
        document = document[: length + 1]
        tokens = np.full(length + 1, END, dtype=np.int64)
        tokens[: len(document)] = document
        counted = np.zeros(length + 1, dtype=np.float32)
        if idx is not None:
            counted[: len(document)] = is_counted(document)
        sample = {
            "tokens": torch.from_numpy(tokens[:-1]),
            "labels": torch.from_numpy(tokens[1:]),
            "loss_mask": torch.from_numpy(counted[1:]),
            "position_ids": torch.arange(length),
        }
        if self.config.create_attention_mask:
            sample["attention_mask"] = torch.ones(1, length, length, dtype=torch.bool).triu(diagonal=1)
        return sample

    def _document(self, idx: int) -> int:
        epoch, position = divmod(idx, len(self.indices))
        if self._order is None or self._order[0] != epoch:
            order = np.random.default_rng((self.config.random_seed, epoch)).permutation(len(self.indices))
            self._order = (epoch, order)
        return int(self.indices[self._order[1][position]])
