"""Every setting of ours with every type of YAML scalar (kind 34): the right value, or an error that names the key.

Megatron's own settings: ``tests/launch/test_megatron_flags.py``. The loader alone: ``tests/launch/test_yaml_file.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_loco.config import OFF, LoCoConfig, fields
from megatron_loco.launch import overrides, yaml_file
from megatron_loco.launch.resolve import OwnSections
from megatron_loco.launch.run_config import RunConfig

SCALARS: dict[str, Any] = {
    "3": 3,
    "0": 0,
    "64": 64,
    "010": 10,
    "-1": -1,
    "1.5": 1.5,
    "3.0": 3.0,
    "0.5": 0.5,
    "1e-3": 1e-3,
    "1.0e-3": 1e-3,
    "2E5": 2e5,
    ".inf": float("inf"),
    "'3'": "3",
    "'1e-3'": "1e-3",
    "true": True,
    "False": False,
    "on": "on",
    "off": "off",
    "yes": "yes",
    "flat": "flat",
    "stdlib": "stdlib",
    "a b": "a b",
    "''": "",
    "null": None,
    "~": None,
    "[4]": [4],
    "[]": [],
}

LOCO_KEYS = {name: kind for name, kind, _, _ in fields()}
RUN_KEYS = {f.name: {"int": int, "str": str, "str | None": str}[str(f.type)] for f in dataclasses.fields(RunConfig)}
KEYS = [*(("loco", name) for name in LOCO_KEYS), *(("run", name) for name in RUN_KEYS)]


def has_type(kind: type, value: Any) -> bool:
    """Whether a value is of a setting's type without any guess: 3 is a number, 3.0 is no whole one, true is neither."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)


def expected(section: str, key: str, value: Any) -> Any:
    """The settings, or ``None`` where they are refused; LoCo that is off is the text."""
    if section == "run":
        if value is None:
            return RunConfig(name="small")
        if not has_type(RUN_KEYS[key], value) or (key == "corpus" and value != "stdlib"):
            return None
        try:
            return RunConfig(**{"name": "small", key: value})
        except ValueError:
            return None
    if key == "bits" and value in (None, OFF):
        return OFF if value == OFF else None
    if value is not None and not has_type(LOCO_KEYS[key], value):
        return None
    try:
        return LoCoConfig(**{"bits": 4, **({key: value} if value is not None else {})})
    except ValueError:
        return None


def loaded(path: str, *words: str) -> OwnSections:
    return OwnSections.read(overrides.apply(yaml_file.load(path), words), config_file=path)


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:
    def write(content: str) -> str:
        (tmp_path / "small.yaml").write_text(content, encoding="utf-8")
        return str(tmp_path / "small.yaml")

    return write


@pytest.mark.kind(34)
@pytest.mark.parametrize(("section", "key"), KEYS)
def test_every_scalar_for_every_setting(file: Callable[[str], str], section: str, key: str) -> None:
    lines = [f"{section}:"] if (section, key) == ("loco", "bits") else ["loco:", "  bits: 4"]
    if section == "run":
        lines.append("run:")
    line = len(lines) + 1
    for text, value in SCALARS.items():
        wanted = expected(section, key, value)
        # The same words in the file and on the command line, which wins over a value that is wrong.
        for in_file, words, where in (
            (text, (), f"small.yaml:{line}"),
            ("[wrong]", (f"{section}.{key}={text}",), "command line"),
        ):
            path = file("\n".join([*lines, f"  {key}: {in_file}", ""]))
            if wanted is None:
                with pytest.raises(ValueError) as refused:
                    loaded(path, *words)
                message = str(refused.value).removeprefix(f"{Path(path).parent}/")
                assert message.startswith(f"{where}: {section}.{key}: ")
                assert "\n" not in message
                continue
            own = loaded(path, *words)
            settings = own.loco if section == "loco" else own.run
            assert settings == (None if wanted == OFF else wanted), (text, settings)
            if settings is not None and value is not None:
                assert type(getattr(settings, key)) is type(value)


@pytest.mark.kind(34)
@pytest.mark.parametrize(("section", "key"), KEYS)
def test_misspelt_settings_are_told_with_the_nearest_name(file: Callable[[str], str], section: str, key: str) -> None:
    for misspelt in (key[:-1], key + "s", key.replace("_", "") + "x"):
        if misspelt in (LOCO_KEYS if section == "loco" else RUN_KEYS):
            continue
        path = file(f"{section}:\n  {misspelt}: 3\n")
        with pytest.raises(ValueError, match=rf"small\.yaml:2: {section}\.{misspelt}: unknown setting"):
            loaded(path)
    with pytest.raises(ValueError, match=f"did you mean {key}"):
        loaded(file(f"{section}:\n  {key}s: 3\n"))
