"""A small LLaMA in plain PyTorch and batches of the quick-start corpus: for :mod:`.hooks` and `scripts/examples/`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_loco.launch import corpus
from megatron_loco.launch.byte_tokens import VOCAB_SIZE

SEQUENCE = 256


class Block(nn.Module):
    """RMSNorm, causal attention with rotary positions, SwiGLU."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Map ``[batch, seq, width]`` to the same shape."""
        batch, seq, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = rotate(qkv[0], rotation), rotate(qkv[1], rotation), qkv[2]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, width))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        mixed: Tensor = self.down(F.silu(gate) * up)
        return x + mixed


class Llama(nn.Module):
    """The quick start's model: 4 layers of 128, bytes as tokens."""

    def __init__(self, *, width: int = 128, layers: int = 4, heads: int = 4, hidden: int = 352) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, VOCAB_SIZE, bias=False)
        for name, param in self.named_parameters():
            if param.dim() > 1:
                depth = (2 * layers) ** 0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(param, std=0.02 / depth)
        frequencies = 10000.0 ** (-torch.arange(0, width // heads, 2) / (width // heads))
        angles = torch.outer(torch.arange(SEQUENCE), frequencies)
        self.register_buffer("rotation", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy in nats of the tokens after the first, shape of ``tokens``: ``[batch, SEQUENCE + 1]``."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, self.rotation.to(x.dtype))
        logits = self.output(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary positions: halves of the last dimension as real and imaginary part."""
    real, imaginary = x.chunk(2, dim=-1)
    cos, sin = rotation
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)


class Batches:
    """Random pieces of Python's documentation (prepared once, in ``data/``), a different one for each step and rank."""

    def __init__(self, rank: int, *, seed: int = 1234, batch: int = 8, data_dir: str = "data") -> None:
        prepared = corpus.prepare("stdlib", data_dir)
        self.tokens = np.memmap(Path(prepared.folder, "text_document.bin"), dtype=np.uint16, mode="r")
        self.rank, self.seed, self.batch = rank, seed, batch

    def __call__(self, step: int) -> Tensor:
        """Tokens of a step, shape ``[batch, SEQUENCE + 1]``."""
        random = np.random.default_rng((self.seed, step, self.rank))
        starts = random.integers(0, len(self.tokens) - SEQUENCE - 1, self.batch)
        return torch.from_numpy(np.stack([self.tokens[s : s + SEQUENCE + 1] for s in starts]).astype(np.int64))
