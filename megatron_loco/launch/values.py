"""Values of a configuration: a scalar or a list of scalars, with the place it came from, and the strict type checks.

The checks say no where a lenient reader would guess: ``1.5`` or ``true`` is no whole number and ``3`` is no text.
"""

from __future__ import annotations

from dataclasses import dataclass

Scalar = bool | int | float | str | None
Value = Scalar | list[Scalar]


@dataclass(frozen=True)
class Setting:
    """One value and where it was written: ``file:line``, ``command line`` or ``launcher default``."""

    value: Value
    where: str


Document = dict[str, dict[str, Setting]]
"""Section -> key -> setting, both in the order of the file; keys are canonical (see ``sections.canonical``)."""


def located(where: str, key: str, problem: object) -> ValueError:
    """The error for one key: ``file:line: section.key: problem``."""
    return ValueError(f"{where}: {key}: {problem}")


def describe(value: object) -> str:
    """A value in the words of the YAML file, for error messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {value!r}"
    if isinstance(value, str):
        return f"the text {value!r}"
    return f"the list {value!r}"


def whole_number(value: Value) -> int:
    """Return a whole number, or raise ValueError.

    Args:
        value: The value as loaded.

    Returns:
        The same number.

    Raises:
        ValueError: it is anything else, such as 1.5, ``"3"`` or ``true``.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    hint = ""
    if isinstance(value, float) and value.is_integer():
        hint = f"; write {int(value)}"
    raise ValueError(f"takes a whole number, got {describe(value)}{hint}{_quotes_hint(value)}")


def number(value: Value) -> float:
    """Return a whole or floating-point number unchanged, or raise ValueError.

    Args:
        value: The value as loaded.

    Returns:
        The same number; a whole number stays one.

    Raises:
        ValueError: it is text, true or false, null, a list, or not a number (nan).
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
        return value
    raise ValueError(f"takes a number, got {describe(value)}{_quotes_hint(value)}")


def text(value: Value) -> str:
    """Return a text, or raise ValueError.

    Args:
        value: The value as loaded.

    Returns:
        The same text.

    Raises:
        ValueError: it is a number, true or false (which need quotes to be text), null or a list.
    """
    if isinstance(value, str):
        return value
    hint = "; put quotes round it" if isinstance(value, bool | int | float) else ""
    raise ValueError(f"takes text, got {describe(value)}{hint}")


def switch(value: Value) -> bool:
    """Return true or false, or raise ValueError.

    Args:
        value: The value as loaded.

    Returns:
        The same value.

    Raises:
        ValueError: it is anything else; ``on``, ``yes`` and 1 are not true in YAML 1.2.
    """
    if isinstance(value, bool):
        return value
    raise ValueError(f"takes true or false, got {describe(value)}")


def _quotes_hint(value: Value) -> str:
    if not isinstance(value, str):
        return ""
    try:
        float(value)
    except ValueError:
        return ""
    return "; remove the quotes"
