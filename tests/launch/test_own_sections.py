"""The sections run, env and loco."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from megatron_loco import config as loco_config
from megatron_loco.launch import loco_section, run_config, yaml_file
from megatron_loco.launch.resolve import OwnSections

Config = Callable[[str], str]


def read(path: str) -> OwnSections:
    return OwnSections.read(yaml_file.load(path), config_file=path)


def test_defaults(config: Config) -> None:
    own = read(config("model:\n  num-layers: 4\n"))
    assert own.run == run_config.RunConfig(name="small", output_dir="runs/small")
    assert own.env == {}
    assert own.loco is None


def test_values(config: Config) -> None:
    own = read(
        config(
            """
            run: {name: a b, device: cpu, nproc_per_node: 2, output-dir: out, corpus: stdlib, data_dir: null}
            env: {A: text, B: 3, C: 1e-4}
            loco: {bits: 8, block-size: 64, beta: 0, reset_interval: null}
            """
        )
    )
    assert own.run == run_config.RunConfig(
        name="a b", device="cpu", nproc_per_node=2, output_dir="out", corpus="stdlib", data_dir="data"
    )
    assert own.environment() == {"A": "text", "B": "3", "C": "0.0001"}
    assert own.loco == loco_config.LoCoConfig(bits=8, block_size=64, beta=0)


@pytest.mark.kind(34)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("run:\n  nproc_per_nod: 2", "2: run.nproc_per_nod: unknown setting; did you mean nproc_per_node?"),
        ("run:\n  nproc_per_node: '2'", "2: run.nproc_per_node: takes a whole number, got the text '2'; remove the q"),
        ("run:\n  nproc_per_node: 1.5", "2: run.nproc_per_node: takes a whole number, got the number 1.5"),
        ("run:\n  nproc_per_node: true", "2: run.nproc_per_node: takes a whole number, got true"),
        ("run:\n  nnodes: 0", "2: run.nnodes: nnodes must be at least 1, got 0"),
        ("run:\n  name: 3", "2: run.name: takes text, got the number 3; put quotes round it"),
        ("run:\n  name: a/b", "2: run.name: name must be usable as the name of a folder"),
        ("run:\n  device: gpu", "2: run.device: device must be one of auto, cpu, cuda, got 'gpu'"),
        (
            "run:\n  corpus: stdlip",
            "2: run.corpus: unknown corpus 'stdlip'; did you mean stdlib? (known: stdlib, stdlib-chat)",
        ),
        ("env:\n  A: true", "2: env.A: takes text or a number, got true; put quotes round it"),
        ("env:\n  A: [a]", "2: env.A: takes text or a number, got the list ['a']"),
        ("env:\n  A:", "2: env.A: takes text or a number, got null"),
        ("env:\n  A-B: x", "2: env.A-B: is not the name of an environment variable"),
        ("loco:\n  bit: 4", "2: loco.bit: unknown setting; did you mean bits?"),
        ("loco:\n  bits: 5", "2: loco.bits: --loco-bits must be one of 1, 2, 4, 8, 32, got 5"),
        ("loco:\n  bits: '4'", "2: loco.bits: takes a whole number, got the text '4'; remove the quotes (or the text"),
        ("loco:\n  bits: false", "2: loco.bits: takes a whole number, got false (or the text off, for a run without"),
        ("loco:\n  bits: 4\n  beta: 1.5", "3: loco.beta: --loco-beta must be a number with 0 <= beta < 1, got 1.5"),
        ("loco:\n  bits: 4\n  beta: high", "3: loco.beta: takes a number, got the text 'high'"),
        ("loco:\n  bits: off\n  block_size: 33", "3: loco.block_size: --loco-block-size must be a multiple of 32"),
        ("loco:\n  beta: 0.5", "2: loco.bits: is missing; set it to one of 1, 2, 4, 8, 32, or to off"),
        ("loco:\n  bits: 4\n  backend: 3", "3: loco.backend: takes text, got the number 3; put quotes round it"),
    ],
)
def test_mistakes_name_file_line_and_key(config: Config, content: str, message: str) -> None:
    path = config(content + "\n")
    with pytest.raises(ValueError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}:{message}")


def test_off_turns_loco_off_and_other_keys_may_stay(config: Config) -> None:
    own = read(config("loco:\n  bits: off\n  beta: 0.5\n"))
    assert own.loco is None
    assert loco_section.as_argv(own.loco) == []


def test_every_field_of_loco_reaches_the_command_line() -> None:
    loco = loco_config.LoCoConfig(bits=4, beta=1e-5)
    argv = loco_section.as_argv(loco)
    assert argv[:2] == ["--loco-bits", "4"]
    assert argv[::2] == [loco_config.flag(field.name) for field in dataclasses.fields(loco)]
    assert argv[argv.index("--loco-beta") + 1] == "1e-05"
