"""Every knob of LoCo: one frozen dataclass with unit, default and source; the CLI and the YAML section derive from it.

Sources of the defaults: LoCo (arXiv 2407.04480), the authors' public Megatron experiment, and DeepSpeed's ZeRO++ port
(``err_beta``, ``reset_T``). Nothing here imports torch, so that the launcher can check a configuration at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

SUPPORTED_BITS = (4, 8, 32)
"""Wire widths. 32 is the identity codec: exact values through the same all-to-all, to verify the path."""

OFF = "off"
"""In place of a number of bits: train without LoCo."""

BACKENDS = ("auto", "reference")
"""Implementations of encode and decode; ``auto`` takes the fastest that the device of the gradients has."""


def _knob(default: Any = dataclasses.MISSING, *, help: str, choices: tuple[Any, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class LoCoConfig:
    """Settings of 4-bit gradient communication; equal on all ranks of a job.

    Raises:
        ValueError: a value is out of range; the message names the Megatron flag and what is allowed.
    """

    bits: int = _knob(
        help="Bits per gradient element on the wire: 4 or 8. 32 sends exact values through the same exchange "
        "(no compression; to verify a set-up).",
        choices=SUPPORTED_BITS,
    )
    block_size: int = _knob(
        256,
        help="Elements that share one fp32 scale (a multiple of 32, from 32 to 4096). Costs 32/block-size bits per "
        "element.",
    )
    beta: float = _knob(
        0.8,
        help="Weight of the OLD error in the moving average of compression errors, 0 <= beta < 1. 0 is classic error "
        "feedback; 0.8 is the value of DeepSpeed's port (err_beta).",
    )
    reset_interval: int = _knob(
        512,
        help="Set the error state to zero every that many optimizer steps (512 in the authors' experiment). 0 = never.",
    )
    warmup_steps: int = _knob(
        10,
        help="Optimizer steps at the start of a run that reduce exactly, by the stock reduce-scatter.",
    )
    backend: str = _knob(
        "auto",
        help="Implementation of encode and decode: 'auto' or 'reference' (plain PyTorch).",
        choices=BACKENDS,
    )

    def __post_init__(self) -> None:
        for name in ("bits", "block_size", "reset_interval", "warmup_steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{flag(name)} must be a whole number, got {value!r}")
        if self.bits not in SUPPORTED_BITS:
            raise ValueError(
                f"--loco-bits must be one of {', '.join(map(str, SUPPORTED_BITS))}, got {self.bits}; "
                "leave the flag out to train without LoCo"
            )
        if not 32 <= self.block_size <= 4096 or self.block_size % 32:
            raise ValueError(f"--loco-block-size must be a multiple of 32 from 32 to 4096, got {self.block_size}")
        if isinstance(self.beta, bool) or not isinstance(self.beta, int | float) or not 0 <= self.beta < 1:
            raise ValueError(f"--loco-beta must be a number with 0 <= beta < 1, got {self.beta!r}")
        for name in ("reset_interval", "warmup_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{flag(name)} must not be negative, got {getattr(self, name)}")
        if self.backend not in BACKENDS:
            raise ValueError(f"--loco-backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}")

    @property
    def is_identity(self) -> bool:
        """Whether values travel unquantised, so that no error state exists."""
        return self.bits == 32


def flag(field_name: str) -> str:
    """The Megatron command-line flag of a field: ``block_size`` -> ``--loco-block-size``."""
    return "--loco-" + field_name.replace("_", "-")


def fields() -> Iterator[tuple[str, type, Any, Mapping[str, Any]]]:
    """Yield ``(name, type, default, metadata)`` of each knob; ``bits`` has no default and turns LoCo on."""
    types = {"int": int, "float": float, "str": str}
    for f in dataclasses.fields(LoCoConfig):
        default = None if f.default is dataclasses.MISSING else f.default
        yield f.name, types[str(f.type)], default, f.metadata
