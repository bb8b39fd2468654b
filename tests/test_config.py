"""Every value out of range is refused by the name of its flag, and nothing can be changed afterwards."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from megatron_loco.config import BACKENDS, SUPPORTED_BITS, LoCoConfig, fields, flag

REJECTED: list[tuple[str, Any]] = [
    *(("bits", value) for value in (0, 3, 5, 16, 64, -4, 4.0, "4", None, True, math.nan)),
    *(("block_size", value) for value in (0, 16, 31, 33, 48, -32, 4128, 8192, 256.0, "256", None, True)),
    *(("beta", value) for value in (1, 1.0, -0.1, 1.5, math.nan, math.inf, -math.inf, "0.8", None, True, False)),
    *(("reset_interval", value) for value in (-1, 512.0, "512", None, False)),
    *(("warmup_steps", value) for value in (-1, 1e1, "10", None, True)),
    *(("error_bits", value) for value in (1, 4, 24, 8.0, "8", None, True)),
    *(("scale_mode", value) for value in ("", "Block", None, 1)),
    *(("fixed_inverse_scale", value) for value in (0, -1.0, 1e-21, 1e21, math.nan, math.inf, "98304", None, True)),
    *(("exact_params", value) for value in ("", " ", "1d,", ",1d", "a,,b", None, 1)),
    *(("min_bucket_numel", value) for value in (-1, 1.0, "0", None)),
    *(("ranks_per_node", value) for value in (-1, 8.0, "8", None)),
    *(("topology", value) for value in ("two_level", "", None)),
    *(("rollback", value) for value in ("keep", None)),
    *(("save_error", value) for value in ("yes", None, True)),
    *(("load_error", value) for value in ("no", None, False)),
    *(("backend", value) for value in ("", "Reference", "triton ", "cuda", None, 1, ["reference"])),
]


@pytest.mark.parametrize(("name", "value"), REJECTED, ids=lambda value: repr(value))
def test_rejected_value_names_its_flag(name: str, value: Any) -> None:
    settings: dict[str, Any] = {"bits": 4, name: value}
    with pytest.raises(ValueError) as caught:
        LoCoConfig(**settings)
    message = str(caught.value)
    assert flag(name) in message
    assert repr(value) in message or str(value) in message
    # No other flag is accused.
    others = {flag(field.name) for field in dataclasses.fields(LoCoConfig)} - {flag(name)}
    assert not [other for other in others if other in message]


@pytest.mark.parametrize(
    "settings",
    [
        *({"bits": bits} for bits in SUPPORTED_BITS),
        *({"bits": 4, "block_size": size} for size in (32, 64, 96, 4096)),
        *({"bits": 4, "beta": beta} for beta in (0, 0.0, 0.5, 1 - 2**-20)),
        {"bits": 4, "reset_interval": 0},
        {"bits": 4, "reset_interval": 1},
        {"bits": 4, "warmup_steps": 0},
        *({"bits": 4, "backend": backend} for backend in BACKENDS),
    ],
    ids=str,
)
def test_limits_are_accepted(settings: dict[str, Any]) -> None:
    config = LoCoConfig(**settings)
    assert all(getattr(config, name) == value for name, value in settings.items())


def test_defaults() -> None:
    # The values that the documentation and the sources (config.py) name.
    assert dataclasses.asdict(LoCoConfig(bits=4)) == {
        "bits": 4,
        "block_size": 256,
        "beta": 0.8,
        "reset_interval": 512,
        "warmup_steps": 10,
        "backend": "auto",
        "error_bits": 8,
        "scale_mode": "block",
        "fixed_inverse_scale": 98304.0,
        "exact_params": "1d",
        "min_bucket_numel": 16384,
        "topology": "auto",
        "ranks_per_node": 0,
        "rollback": "zero",
        "save_error": "always",
        "load_error": "auto",
        "chunk_bytes": 0,
    }


@pytest.mark.parametrize(
    ("patterns", "exact"),
    [
        ("1d", {"norm.weight", "linear.bias"}),
        ("none", set()),
        ("*.bias, embedding.*", {"linear.bias", "embedding.weight"}),
        ("1d,*embedding*", {"norm.weight", "linear.bias", "embedding.weight"}),
        ("*", {"norm.weight", "linear.bias", "linear.weight", "embedding.weight"}),
    ],
)
def test_exact_params(patterns: str, exact: set[str]) -> None:
    names = {"norm.weight": 1, "linear.bias": 1, "linear.weight": 2, "embedding.weight": 2}
    config = LoCoConfig(bits=4, exact_params=patterns)
    assert {name for name, dimensions in names.items() if config.is_exact(name, dimensions)} == exact
    assert all(LoCoConfig(bits=32, exact_params=patterns).is_exact(name, dim) for name, dim in names.items())


def test_width_has_no_default_and_positions_mean_nothing() -> None:
    with pytest.raises(TypeError, match="bits"):
        LoCoConfig()  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        LoCoConfig(4)  # type: ignore[misc]
    with pytest.raises(TypeError, match="block_sise"):
        LoCoConfig(bits=4, block_sise=32)  # type: ignore[call-arg]


def test_frozen_and_replaceable() -> None:
    config = LoCoConfig(bits=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.bits = 8  # type: ignore[misc]
    assert dataclasses.replace(config, beta=0.5) == LoCoConfig(bits=4, beta=0.5)
    with pytest.raises(ValueError, match="--loco-beta"):
        dataclasses.replace(config, beta=1.0)
    assert len({config, LoCoConfig(bits=4)}) == 1


def test_only_32_bits_is_the_identity() -> None:
    assert [LoCoConfig(bits=bits).is_identity for bits in SUPPORTED_BITS] == [bits == 32 for bits in SUPPORTED_BITS]


def test_fields_describe_every_knob() -> None:
    described = {name: (kind, default, metadata) for name, kind, default, metadata in fields()}
    assert list(described) == [field.name for field in dataclasses.fields(LoCoConfig)]
    defaults = LoCoConfig(bits=4)
    for name, (kind, default, metadata) in described.items():
        assert metadata["help"]
        if name == "bits":
            assert default is None  # absent: LoCo is off
        else:
            assert default == getattr(defaults, name)
        assert isinstance(getattr(defaults, name), kind)
    assert described["bits"][2]["choices"] == SUPPORTED_BITS
    assert described["backend"][2]["choices"] == BACKENDS
