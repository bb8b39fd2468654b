"""Every knob of LoCo: one frozen dataclass with unit, default and source; the CLI and the YAML section derive from it.

Sources of the defaults: LoCo (arXiv 2407.04480), the authors' public Megatron experiment, and DeepSpeed's ZeRO++ port
(``err_beta``, ``reset_T``). Nothing here imports torch, so that the launcher can check a configuration at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

SUPPORTED_BITS = (1, 2, 4, 8, 32)
"""Wire widths. 32 is the identity codec: exact values through the same all-to-all, to verify the path."""

OFF = "off"
"""In place of a number of bits: train without LoCo."""

BACKENDS = ("auto", "reference", "cpu", "triton")
"""Implementations of encode and decode; ``auto`` takes the fastest that the device of the gradients has."""

ERROR_BITS = (0, 8, 16, 32)
"""Widths of the stored error; 0 keeps none, which is plain quantisation without error feedback."""

SCALE_MODES = ("block", "fixed")
TOPOLOGIES = ("auto", "flat", "two-level")
ROLLBACKS = ("zero", "restore")
SAVE_ERROR = ("always", "never")
LOAD_ERROR = ("auto", "never")

ONE_DIMENSIONAL = "1d"
"""In ``exact_params``: every parameter with fewer than two dimensions (norm weights, biases)."""


def _knob(default: Any = dataclasses.MISSING, *, help: str, choices: tuple[Any, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class LoCoConfig:
    """Settings of 4-bit gradient communication; equal on all ranks of a job.

    Raises:
        ValueError: a value is out of range; the message names the Megatron flag and what is allowed.
    """

    bits: int = _knob(
        help="Bits per gradient element on the wire: 4 or 8; 1 and 2 for experiments. 32 sends exact values through "
        "the same exchange (no compression; to verify a set-up).",
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
    error_bits: int = _knob(
        8,
        help="Bits per element of the stored error: 8, 16 or 32 (exact fp32). 0 keeps no error: plain quantisation, "
        "for comparison.",
        choices=ERROR_BITS,
    )
    scale_mode: str = _knob(
        "block",
        help="'block': one scale per block, from its largest magnitude. 'fixed': one constant for everything, the "
        "authors' first experiment, for comparison.",
        choices=SCALE_MODES,
    )
    fixed_inverse_scale: float = _knob(
        98304.0,
        help="With --loco-scale-mode fixed: codes are round(gradient * this), of the gradient without loss scale and "
        "token count (98304 in the authors' experiment).",
    )
    exact_params: str = _knob(
        ONE_DIMENSIONAL,
        help="Parameters whose gradients travel unquantised: comma-separated shell patterns of parameter names, where "
        "'1d' means all with fewer than two dimensions; 'none' for none. For example '1d,*embedding*'.",
    )
    min_bucket_numel: int = _knob(
        16384,
        help="Buckets with fewer gradient elements than this (LoRA adapters, tiny experts) reduce exactly, by the "
        "stock reduce-scatter: their transfer is all latency. 0 compresses all.",
    )
    reset_interval: int = _knob(
        512,
        help="Set the error state to zero every that many optimizer steps (512 in the authors' experiment). 0 = never.",
    )
    warmup_steps: int = _knob(
        10,
        help="Optimizer steps at the start of a run that reduce exactly, by the stock reduce-scatter.",
    )
    topology: str = _knob(
        "auto",
        help="'flat': one all-to-all over the group. 'two-level': exact reduce-scatter inside each node, compressed "
        "all-to-all between nodes. 'auto': two-level where several ranks of a group share a node and the group spans "
        "several nodes evenly, else flat.",
        choices=TOPOLOGIES,
    )
    ranks_per_node: int = _knob(
        0,
        help="Consecutive global ranks that count as one node for --loco-topology. 0 = as placed: by host.",
    )
    rollback: str = _knob(
        "zero",
        help="The error after a step that was thrown away (loss-scale overflow, a step that Megatron's rerun machine "
        "repeats): 'zero' starts it anew; 'restore' brings back the one before the step, for twice the error memory.",
        choices=ROLLBACKS,
    )
    save_error: str = _knob(
        "always",
        help="Whether checkpoints hold the error state (one byte per parameter and data-parallel rank): 'always' or "
        "'never'; without it a resumed run starts with zero error.",
        choices=SAVE_ERROR,
    )
    load_error: str = _knob(
        "auto",
        help="'auto': resume with the error state of the checkpoint if it was saved by the same layout of ranks, else "
        "with zero error. 'never': always with zero error, for instance if the saved one is damaged.",
        choices=LOAD_ERROR,
    )
    chunk_bytes: int = _knob(
        0,
        help="About how many bytes a rank sends in one all-to-all: a larger bucket travels in chunks (64 at most), "
        "encoded and decoded while others are on their way. Changes no result. 0 = measured for the device.",
    )
    backend: str = _knob(
        "auto",
        help="Implementation of encode and decode; all give the same bits: 'cpu' (compiled at first use), 'triton' "
        "(GPU), 'reference' (plain PyTorch, on both), or 'auto', the fastest for the device.",
        choices=BACKENDS,
    )

    def __post_init__(self) -> None:
        for name in (f.name for f in dataclasses.fields(self) if f.type == "int"):
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
            raise ValueError(
                f"--loco-beta must be a number with 0 <= beta < 1, got {self.beta!r}; no feedback at all: error_bits 0"
            )
        for name in ("reset_interval", "warmup_steps", "min_bucket_numel", "ranks_per_node", "chunk_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{flag(name)} must not be negative, got {getattr(self, name)}")
        for f in dataclasses.fields(self):
            choices = f.metadata["choices"]
            if choices is not None and getattr(self, f.name) not in choices:
                allowed = ", ".join(map(str, choices))
                raise ValueError(f"{flag(f.name)} must be one of {allowed}, got {getattr(self, f.name)!r}")
        inverse = self.fixed_inverse_scale
        # Far within fp32, so that a loss scale leaves it there (core.quantize.FIXED_SCALE_RANGE).
        if isinstance(inverse, bool) or not isinstance(inverse, int | float) or not 1e-20 <= inverse <= 1e20:
            raise ValueError(f"--loco-fixed-inverse-scale must be a number from 1e-20 to 1e20, got {inverse!r}")
        if not isinstance(self.exact_params, str) or not all(self.exact_patterns or ("none",)):
            raise ValueError(
                f"--loco-exact-params must be patterns with commas between, or 'none', got {self.exact_params!r}"
            )

    @property
    def exact_patterns(self) -> tuple[str, ...]:
        """The patterns of ``exact_params``, in order; empty for ``none``."""
        if self.exact_params.strip() == "none":
            return ()
        return tuple(pattern.strip() for pattern in self.exact_params.split(","))

    def is_exact(self, name: str, num_dimensions: int) -> bool:
        """Whether the gradients of a parameter travel unquantised.

        Args:
            name: Its name as in ``module.named_parameters()``.
            num_dimensions: Its number of dimensions.
        """
        return self.is_identity or any(
            num_dimensions < 2 if pattern == ONE_DIMENSIONAL else fnmatchcase(name, pattern)
            for pattern in self.exact_patterns
        )

    @property
    def is_identity(self) -> bool:
        """Whether values travel unquantised, so that no error state exists."""
        return self.bits == 32

    @property
    def keeps_error(self) -> bool:
        """Whether one step's compression error is added to the gradients of the next."""
        return not self.is_identity and self.error_bits > 0

    @property
    def depends_on_unit(self) -> bool:
        """Whether it matters what the gradients are multiplied by: loss scale, number of tokens."""
        return self.keeps_error or (not self.is_identity and self.scale_mode == "fixed")


def flag(field_name: str) -> str:
    """The Megatron command-line flag of a field: ``block_size`` -> ``--loco-block-size``."""
    return "--loco-" + field_name.replace("_", "-")


def fields() -> Iterator[tuple[str, type, Any, Mapping[str, Any]]]:
    """Yield ``(name, type, default, metadata)`` of each knob; ``bits`` has no default and turns LoCo on."""
    types = {"int": int, "float": float, "str": str}
    for f in dataclasses.fields(LoCoConfig):
        default = None if f.default is dataclasses.MISSING else f.default
        yield f.name, types[str(f.type)], default, f.metadata
