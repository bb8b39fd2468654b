"""Megatron's command-line flags: every key of the Megatron sections is checked against Megatron's own parser.

Megatron is imported only when it is needed: that takes seconds, and a mistake in ``run`` or ``loco`` is told at once.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import logging
import warnings
from collections.abc import Iterator
from typing import Any

from megatron_loco import config
from megatron_loco.launch.run_config import RunConfig
from megatron_loco.launch.sections import MEGATRON_SECTIONS, nearest
from megatron_loco.launch.values import Document, Scalar, Value, describe, located, number, switch, text, whole_number

REFUSED = {
    "help": "is not a setting",
    "yaml-cfg": "would make Megatron ignore all other flags; write its keys in this file",
}


class MegatronFlags:
    """The flags of one Megatron parser, by name without the leading dashes.

    Args:
        parser: A parser with Megatron's arguments; :meth:`load` builds the one of the installed Megatron.
    """

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._actions = {
            option[2:].replace("_", "-"): (action, option)
            for action in parser._actions  # argparse has no public list of its options
            for option in action.option_strings
            if option.startswith("--")
        }

    @classmethod
    def load(cls) -> MegatronFlags:
        """Ask Megatron for its flags (imports Megatron).

        Raises:
            ValueError: it lacks ``megatron.training`` (the wheel of 0.16), or a package that this release imports.
        """
        with quiet():
            try:
                from megatron.training.arguments import add_megatron_arguments
            except ModuleNotFoundError as error:
                raise ValueError(_missing(error)) from None

            parser = argparse.ArgumentParser(allow_abbrev=False)
            add_megatron_arguments(parser)
        return cls(parser)

    def argv(self, document: Document) -> list[str]:
        """Check the Megatron sections and turn them into arguments, in the order of the file.

        Args:
            document: All sections; those that are not Megatron's are left aside.

        Returns:
            The arguments; null leaves a flag out.

        Raises:
            ValueError: a flag does not exist, is given twice (in two sections, or under two names), or its value has
                the wrong type or is not one of the choices. The message names file, line and key.
        """
        words: list[str] = []
        seen: dict[int, str] = {}
        for section, settings in document.items():
            if section not in MEGATRON_SECTIONS:
                continue
            for key, setting in settings.items():
                name = f"{section}.{key}"
                if key in REFUSED:
                    raise located(setting.where, name, REFUSED[key])
                if key not in self._actions:
                    raise located(setting.where, name, f"Megatron has no flag --{key}{self._nearest(key)}")
                action, option = self._actions[key]
                if id(action) in seen:
                    raise located(setting.where, name, f"the same flag is already set as {seen[id(action)]}")
                seen[id(action)] = f"{name} ({setting.where})"
                if setting.value is None:
                    continue
                try:
                    words += _arguments(action, option, setting.value)
                except ValueError as error:
                    raise located(setting.where, name, error) from None
        return words

    def _nearest(self, key: str) -> str:
        field = key.removeprefix("loco-").replace("-", "_")
        if field in {name for name, *_ in config.fields()}:
            return f"; did you mean loco.{field}?"
        return f"; did you mean run.{field}?" if field in RunConfig.__annotations__ else nearest(key, self._actions)


def _missing(error: ModuleNotFoundError) -> str:
    name = error.name or ""
    if name == "megatron" or name.startswith("megatron."):
        return (
            f"{error}: megatron-core 0.17 to 0.19 has a training loop; for 0.16, set MEGATRON_LM_DIR to a Megatron-LM "
            "checkout of that release"
        )
    package = {"yaml": "pyyaml"}.get(name, name)
    return f"{error}: this release of Megatron imports it and does not declare it: pip install {package}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what importing Megatron says about packages that are not installed (the ranks say it again in their log)."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _arguments(action: argparse.Action, option: str, value: Value) -> list[str]:
    if isinstance(action, argparse.BooleanOptionalAction):
        inverse = next(o for o in action.option_strings if o.startswith("--no-") != option.startswith("--no-"))
        return [option] if switch(value) else [inverse]
    if action.nargs == 0:
        return [option] if switch(value) else []
    if action.type is bool:  # argparse's bool("False") is True, so only the true case may be written out
        return [option, "True"] if switch(value) else []
    if action.nargs is None:
        word = _word(action, value)
        # with two words argparse would take a leading dash for the next flag
        return [f"{option}={word}"] if word.startswith("-") else [option, word]
    items = value if isinstance(value, list) else [value]
    if action.nargs == "+" and not items:
        raise ValueError("takes a list of at least one value")
    if isinstance(action.nargs, int) and len(items) != action.nargs:
        raise ValueError(f"takes a list of {action.nargs} values, got {len(items)}")
    words = [_word(action, item) for item in items]
    if dashed := [word for word in words if word.startswith("-") and not word[1:].replace(".", "", 1).isdigit()]:
        raise ValueError(f"a value in a list must not start with a dash, got {dashed[0]!r}")
    return [option, *words]


def _word(action: argparse.Action, value: Value) -> str:
    if isinstance(value, list):
        raise ValueError(f"takes one value, got {describe(value)}")
    converted: Any
    if action.type is int:
        converted = whole_number(value)
    elif action.type is float:
        converted = number(value)
    elif action.type is None or action.type is str:
        converted = text(value)
    else:
        converted = _convert(action, value)
    if action.choices is not None and converted not in action.choices:
        raise ValueError(f"must be one of {_choices(action)}, got {describe(value)}")
    return str(value)


def _convert(action: argparse.Action, value: Scalar) -> Any:
    """Call Megatron's own conversion, which knows its format best; it takes the text of the command line."""
    if value is None or isinstance(value, bool):
        raise ValueError(f"takes text or a number, got {describe(value)}")
    assert callable(action.type)  # argparse's registered type names are not used by Megatron
    try:
        return action.type(str(value))
    except Exception as error:  # whatever Megatron's function raises is its judgement of the value
        if action.choices is not None:
            raise ValueError(f"must be one of {_choices(action)}, got {describe(value)}") from None
        raise ValueError(f"Megatron refuses {describe(value)}: {error or type(error).__name__}") from None


def _choices(action: argparse.Action) -> str:
    return ", ".join(c.name if isinstance(c, enum.Enum) else str(c) for c in action.choices or ())
