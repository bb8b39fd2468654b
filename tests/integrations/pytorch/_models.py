"""Models whose gradients are whole numbers, so that sums are exact in any order, and a small real one."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Layers(nn.Module):
    """Linear layers of odd sizes, one with a bias. With whole-number weights and inputs so are the gradients."""

    SIZES = (17, 33, 31, 5)

    def __init__(self, *, whole: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(n, m, bias=index == 0)
            for index, (n, m) in enumerate(zip(self.SIZES, self.SIZES[1:], strict=False))
        )
        if whole:
            with torch.no_grad():
                for param in self.parameters():
                    param.copy_(torch.randint(-1, 2, param.shape))

    def forward(self, x: Tensor, *, skip: int | None = None) -> Tensor:
        """Apply all layers; without layer ``skip`` its output is one, and it and those before it get no gradient."""
        for index, layer in enumerate(self.layers):
            x = x.new_ones(len(x), layer.out_features) if index == skip else layer(x)
        return x


class TinyLM(nn.Module):
    """Embedding, norm, a hidden layer and an output layer, tied to the embedding or not."""

    def __init__(self, *, vocab: int = 64, width: int = 48, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(width), nn.Linear(width, width), nn.SiLU()) for _ in range(2)
        )
        self.output = nn.Linear(width, vocab, bias=False)
        if tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Cross entropy of the next token."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.output(x).flatten(0, 1), tokens[:, 1:].flatten())


def whole_batch(step: int, rank: int) -> Tensor:
    """Inputs of :class:`Layers`."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(-1, 2, (3, Layers.SIZES[0]), generator=generator).float()


def token_batch(step: int, rank: int, *, vocab: int = 64) -> Tensor:
    """Inputs of :class:`TinyLM`: the next token is the present one plus one or two."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    steps = torch.randint(1, 3, (4, 17), generator=generator)
    return (torch.randint(0, vocab, (4, 1), generator=generator) + steps.cumsum(1)) % vocab
