"""KEY=VALUE on the command line: it wins, in any section, and mistakes are told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_loco.launch import overrides, yaml_file
from megatron_loco.launch.values import Document, Setting

FILE = """
model:
  num-layers: 4
training:
  lr: 1e-3
  train-iters: 300
"""


@pytest.fixture
def document(config: Callable[[str], str]) -> Document:
    return yaml_file.load(config(FILE))


@pytest.mark.kind(34)
@pytest.mark.parametrize("key", ["train-iters", "train_iters", "training.train-iters", "model.train_iters"])
def test_a_flag_is_replaced_where_the_file_has_it(document: Document, key: str) -> None:
    result = overrides.apply(document, [f"{key}=20"])
    assert result["training"]["train-iters"] == Setting(20, "command line")
    assert list(result["training"]) == ["lr", "train-iters"]
    assert list(result["model"]) == ["num-layers"]
    assert document["training"]["train-iters"].value == 300


def test_new_keys_and_other_sections(document: Document) -> None:
    words = ["loco.bits=off", "run.nproc-per-node=2", "env.FOO_bar=x=y", "seed=1", "data.split='98,2,0'"]
    result = overrides.apply(document, [*words, "data-path=[a, b]"])
    assert result["loco"]["bits"].value == "off"
    assert result["run"]["nproc_per_node"].value == 2
    assert result["env"]["FOO_bar"].value == "x=y"
    assert result["training"]["seed"].value == 1
    assert result["training"]["data-path"].value == ["a", "b"]
    assert result["data"]["split"].value == "98,2,0"


def test_the_later_of_two_wins(document: Document) -> None:
    assert overrides.apply(document, ["lr=1", "training.lr=2"])["training"]["lr"].value == 2


RESOLVED = """
run: {name: first, output_dir: runs/first}
logging: {tensorboard-dir: runs/first/tensorboard}
checkpoint: {save: runs/first/checkpoints, load: runs/first/checkpoints}
"""


@pytest.mark.parametrize(
    ("words", "output_dir", "tensorboard", "save"),
    [
        ([], "runs/first", "runs/first/tensorboard", "runs/first/checkpoints"),
        (["run.output_dir=other"], "other", None, None),
        (["run.name=second"], None, None, None),
        (["run.name=first"], "runs/first", "runs/first/tensorboard", "runs/first/checkpoints"),
        (["run.name=second", "run.output_dir=other"], "other", None, None),
        (["run.output_dir=other", "save=mine"], "other", None, "mine"),
        (["run.output_dir=other", "save=runs/first/checkpoints"], "other", None, "runs/first/checkpoints"),
        (["run.output_dir=null"], None, None, None),
    ],
)
def test_folders_follow_the_name(
    config: Callable[[str], str],
    words: list[str],
    output_dir: str | None,
    tensorboard: str | None,
    save: str | None,
) -> None:
    # None: not in the document any more (or null), the launcher's default.
    result = overrides.apply(yaml_file.load(config(RESOLVED)), words)

    def value(section: str, key: str) -> object:
        return result[section][key].value if key in result[section] else None

    assert value("run", "output_dir") == output_dir
    assert value("logging", "tensorboard-dir") == tensorboard
    assert value("checkpoint", "save") == save
    assert value("checkpoint", "load") == "runs/first/checkpoints"


@pytest.mark.kind(34)
@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train-iters", "'train-iters' is not KEY=VALUE"),
        ("=3", "'=3' is not KEY=VALUE"),
        ("trainig.lr=3", "trainig.lr: unknown section trainig; did you mean training?"),
        ("lr=", "lr: the value is empty"),
        ("lr=# x", "lr: the value is empty"),
        ("env.A=a #b", "env.A: YAML reads a comment in 'a #b'; put quotes round the value"),
        ("env.A=a: b", "env.A: expected one value or a list of values, got a group of keys"),
        ("lr=[1", "lr: not valid YAML"),
        ("lr=a\tb", "lr: a tab in YAML"),
    ],
)
def test_mistakes(document: Document, word: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        overrides.apply(document, [word])
    assert str(error.value).startswith(f"command line: {message}")
