"""What the loader accepts, and the sentence for everything that it does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_loco.launch import yaml_file
from megatron_loco.launch.values import Value

Config = Callable[[str], str]

SCALARS: list[tuple[str, Value]] = [
    ("3", 3),
    ("010", 10),
    ("0o10", 8),
    ("1.5", 1.5),
    ("1e-4", 1e-4),
    ("2E-5", 2e-5),
    ("1.0e-3", 1e-3),
    ("-3", -3),
    (".inf", math.inf),
    ('"3"', "3"),
    ("'1e-4'", "1e-4"),
    ("true", True),
    ("False", False),
    ("on", "on"),
    ("off", "off"),
    ("yes", "yes"),
    ("no", "no"),
    ("null", None),
    ("~", None),
    ("98,2,0", "98,2,0"),
    ("1:30", "1:30"),
    ("a b  # comment", "a b"),
    ('""', ""),
    ("[a, 1, 0.5, true]", ["a", 1, 0.5, True]),
    ("[]", []),
]


@pytest.mark.kind(34)
@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_scalars_in_a_file(config: Config, text: str, value: Value) -> None:
    loaded = yaml_file.load(config(f"env:\n  KEY: {text}\n"))["env"]["KEY"].value
    assert loaded == value
    assert type(loaded) is type(value)


@pytest.mark.parametrize(("text", "value"), [case for case in SCALARS if "#" not in case[0]])
def test_scalars_outside_a_file(text: str, value: Value) -> None:
    loaded = yaml_file.parse_value(text, "here")
    assert loaded == value
    assert type(loaded) is type(value)


def test_missing_value_is_null_and_an_empty_section_is_empty(config: Config) -> None:
    document = yaml_file.load(config("training:\n  lr:\nmodel:\n"))
    assert document["training"]["lr"].value is None
    assert document["model"] == {}


def test_settings_know_their_lines_and_spelling(config: Config) -> None:
    path = config("# comment\n\nmodel:\n  num_layers: 4\n  hidden-size: 8\nloco:\n  block-size: 32\nenv:\n  A_B: x\n")
    document = yaml_file.load(path)
    assert document["model"]["num-layers"].where == f"{path}:4"
    assert document["model"]["hidden-size"].where == f"{path}:5"
    assert list(document["loco"]) == ["block_size"]
    assert list(document["env"]) == ["A_B"]


BAD_FILES = [
    ("", "{path}: the file is empty; a configuration has sections"),
    ("# nothing\n", "{path}: the file is empty"),
    ("---\n", "{path}: the file is empty"),
    ("- a\n- b\n", "{path}:1: the file holds a list; it must hold sections"),
    ("\nword\n", "{path}:2: the file holds a single value"),
    ("model:\n\tnum-layers: 4\n", "{path}:2: a tab in YAML"),
    ("model:\n  num-layers:\t4\n\t\n  a: [\t", "{path}:"),
    ("modl:\n  num-layers: 4\n", "{path}:1: modl: unknown section; did you mean model? (sections: run, env, loco,"),
    ("num-layers: 4\n", "{path}:1: num-layers: unknown section"),
    ("model: 4\n", "{path}:1: model: a section holds lines of 'key: value'"),
    ("model:\n  - num-layers\n", "{path}:2: model: a section holds lines"),
    ("model:\n  a: 1\nmodel:\n  b: 1\n", "{path}:3: model: the section is given twice, first on line 1"),
    ("model:\n  lr: 1\n  x: 2\n  lr: 3\n", "{path}:4: model.lr: the key is given twice, first on line 2 as lr"),
    ("model:\n  a-b: 1\n  a_b: 3\n", "{path}:3: model.a_b: the key is given twice, first on line 2 as a-b"),
    ("model:\n  lr: {a: 1}\n", "{path}:2: model.lr: expected one value or a list of values, got a group of keys"),
    ("model:\n  lr:\n    a: 1\n", "{path}:2: model.lr: expected one value or a list of values, got a group of keys"),
    ("model:\n  lr: [[1]]\n", "{path}:2: model.lr: expected one value or a list of values, got a list inside a list"),
    ("model:\n  lr: 2024-01-01\n", "{path}:2: model.lr: '2024-01-01' is read as a date; put quotes round it"),
    ("model:\n  lr: !!python/object:os.system x\n", "{path}:2: model.lr: cannot read 'x' as"),
    ("model:\n  lr: [1\n", "{path}:3: not valid YAML:"),
    ("model:\n  lr: *a\n", "{path}:2: not valid YAML: found undefined alias"),
    ("model:\n  ? [a]\n  : 1\n", "{path}:2: a key must be a name"),
    ("model:\n  a: 1\n---\nmodel:\n", "{path}:3: not valid YAML:"),
]


@pytest.mark.kind(34)
@pytest.mark.parametrize(("content", "message"), BAD_FILES)
def test_bad_files_are_told_in_one_sentence(config: Config, content: str, message: str) -> None:
    path = config(content)
    with pytest.raises(ValueError) as error:
        yaml_file.load(path)
    assert str(error.value).startswith(message.format(path=path))
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.yaml: no such file"):
        yaml_file.load(tmp_path / "absent.yaml")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        yaml_file.load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"model:\n  a: \xfc\n")
    with pytest.raises(ValueError, match="is not a text file in UTF-8"):
        yaml_file.load(tmp_path / "latin.yaml")


@pytest.mark.kind(34)
def test_what_is_written_loads_to_the_same_values(config: Config) -> None:
    texts = ["on", "no", "null", "~", "3", "010", "1e-4", "true", "", " x ", "a: b", "a #b", "# a", "2024-01-01", "ü"]
    texts += ["- a", "[a]", "{a}", "*a", "!a", "'", '"', "a\nb", "a\tb", "x" * 300 + " y", "%", "@x", "a:", "\u2028"]
    values: dict[str, Value] = {f"T{i}": text for i, text in enumerate(texts)}
    values |= {"I": 3, "F": 1e-5, "G": 1e22, "H": 0.1 + 0.2, "N": None, "B": True, "L": [1, "1", None], "E": []}
    loaded = yaml_file.load(config(yaml_file.dump({"env": values, "run": {}, "model": {"a": 1}}, comment="one\ntwo")))
    assert {key: setting.value for key, setting in loaded["env"].items()} == values
    assert list(loaded) == ["env", "model"]
