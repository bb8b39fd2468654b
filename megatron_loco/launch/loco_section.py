"""The ``loco`` section: fields of LoCoConfig, or ``bits: off`` for the same run without LoCo."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from megatron_loco import config
from megatron_loco.launch.sections import nearest
from megatron_loco.launch.values import Setting, Value, located, number, text, whole_number

_TAKE: dict[type, Callable[[Value], Any]] = {int: whole_number, float: number, str: text}


def from_section(section: Mapping[str, Setting]) -> config.LoCoConfig | None:
    """Build the settings of LoCo.

    Args:
        section: Canonical key -> setting. null means the default.

    Returns:
        The settings, or ``None`` when the section is empty or says ``bits: off``; the other keys are checked even then.

    Raises:
        ValueError: a key is unknown, a value has the wrong type or is out of range, or ``bits`` is missing.
    """
    if not section:
        return None
    types = {name: kind for name, kind, _, _ in config.fields()}
    values: dict[str, Any] = {}
    off = False
    for key, setting in section.items():
        if key not in types:
            raise located(setting.where, f"loco.{key}", f"unknown setting{nearest(key, types)}")
        if setting.value is None:
            continue
        if key == "bits" and setting.value == config.OFF:
            off = True
            continue
        try:
            values[key] = _TAKE[types[key]](setting.value)
            # one key at a time, to know its line; 32 (no compression) stands in for the one required field
            config.LoCoConfig(**{"bits": 32, key: values[key]})
        except ValueError as error:
            hint = " (or the text off, for a run without LoCo)" if key == "bits" else ""
            raise located(setting.where, f"loco.{key}", f"{error}{hint}") from None
    if off:
        return None
    last = list(section.values())[-1]
    if "bits" not in values:
        bits = ", ".join(map(str, config.SUPPORTED_BITS))
        raise located(last.where, "loco.bits", f"is missing; set it to one of {bits}, or to off")
    try:
        return config.LoCoConfig(**values)
    except ValueError as error:
        raise located(last.where, "loco", error) from None


def as_values(loco: config.LoCoConfig | None) -> dict[str, Value]:
    """The section that :func:`from_section` reads back: every field, or only ``bits: off``."""
    return {"bits": config.OFF} if loco is None else dataclasses.asdict(loco)


def as_argv(loco: config.LoCoConfig | None) -> list[str]:
    """The ``--loco-*`` flags, every field in full; none without LoCo, so that Megatron runs as it comes."""
    if loco is None:
        return []
    return [word for name, value in dataclasses.asdict(loco).items() for word in (config.flag(name), str(value))]
