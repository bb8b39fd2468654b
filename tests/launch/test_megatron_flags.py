"""Keys of the Megatron sections against Megatron's own parser."""

from __future__ import annotations

import argparse
import importlib.abc
import logging
import sys
from collections.abc import Callable

import pytest

from megatron_loco.launch import yaml_file
from megatron_loco.launch.megatron_flags import MegatronFlags, quiet

Config = Callable[[str], str]

ACCEPTED = [
    ("num-layers: 4", ["--num-layers", "4"]),
    ("num_layers: 4", ["--num-layers", "4"]),
    ("num-layers: null", []),
    ("lr: 1e-4", ["--lr", "0.0001"]),
    ("lr: 1", ["--lr", "1"]),
    ("lr: 3e-7", ["--lr", "3e-07"]),
    ("lr: -1e-5", ["--lr=-1e-05"]),
    ("save: a b", ["--save", "a b"]),
    ("save: -x", ["--save=-x"]),
    ('split: "98,2,0"', ["--split", "98,2,0"]),
    ("bf16: true", ["--bf16"]),
    ("bf16: false", []),
    ("no-masked-softmax-fusion: true", ["--no-masked-softmax-fusion"]),
    ("no-masked-softmax-fusion: false", []),
    ("rl-partial-rollouts: true", ["--rl-partial-rollouts"]),
    ("rl-partial-rollouts: false", ["--no-rl-partial-rollouts"]),
    ("no-rl-partial-rollouts: false", ["--rl-partial-rollouts"]),
    ("onnx-safe: true", ["--onnx-safe", "True"]),
    ("onnx-safe: false", []),
    ("override-opt-param-scheduler: true", ["--override-opt-param-scheduler"]),
    ("data-path: a", ["--data-path", "a"]),
    ("data-path: [a, b]", ["--data-path", "a", "b"]),
    ('data-path: ["0.5", a b]', ["--data-path", "0.5", "a b"]),
    ("profile-ranks: 3", ["--profile-ranks", "3"]),
    ("profile-ranks: [0, 1]", ["--profile-ranks", "0", "1"]),
    ("rampup-batch-size: [1, 2, 3]", ["--rampup-batch-size", "1", "2", "3"]),
    ("moe-aux-loss-coeff: [0.5, 1]", ["--moe-aux-loss-coeff", "0.5", "1"]),
    ("moe-layer-freq: 2", ["--moe-layer-freq", "2"]),
    ('moe-layer-freq: "([0]+[1]*3)"', ["--moe-layer-freq", "([0]+[1]*3)"]),
    ("window-size: 127,0", ["--window-size", "127,0"]),
    ("attention-backend: unfused", ["--attention-backend", "unfused"]),
    ("exit-signal: SIGUSR1", ["--exit-signal", "SIGUSR1"]),
    ("timing-log-level: 1", ["--timing-log-level", "1"]),
]


@pytest.mark.parametrize(("line", "argv"), ACCEPTED)
def test_values_become_arguments(config: Config, flags: MegatronFlags, line: str, argv: list[str]) -> None:
    assert flags.argv(yaml_file.load(config(f"training:\n  {line}\n"))) == argv


REFUSED = [
    ("num-layer: 4", "num-layer: Megatron has no flag --num-layer; did you mean num-layers?"),
    ("trainiters: 4", "trainiters: Megatron has no flag --trainiters; did you mean train-iters?"),
    ("loco-bits: 4", "loco-bits: Megatron has no flag --loco-bits; did you mean loco.bits?"),
    ("nproc_per_node: 4", "nproc-per-node: Megatron has no flag --nproc-per-node; did you mean run.nproc_per_node?"),
    ("qqqqqqqqq: 4", "qqqqqqqqq: Megatron has no flag --qqqqqqqqq"),
    ("help: true", "help: is not a setting"),
    ("yaml-cfg: a.yaml", "yaml-cfg: would make Megatron ignore all other flags"),
    ("num-layers: 1.5", "num-layers: takes a whole number, got the number 1.5"),
    ('num-layers: "3"', "num-layers: takes a whole number, got the text '3'; remove the quotes"),
    ("num-layers: true", "num-layers: takes a whole number, got true"),
    ("num-layers: [4]", "num-layers: takes one value, got the list [4]"),
    ("train-samples: 1e6", "train-samples: takes a whole number, got the number 1000000.0; write 1000000"),
    ('lr: "1e-4"', "lr: takes a number, got the text '1e-4'; remove the quotes"),
    ("lr: on", "lr: takes a number, got the text 'on'"),
    ("lr: true", "lr: takes a number, got true"),
    ("lr: .nan", "lr: takes a number, got the number nan"),
    ("save: 3", "save: takes text, got the number 3; put quotes round it"),
    ("save: false", "save: takes text, got false; put quotes round it"),
    ("bf16: on", "bf16: takes true or false, got the text 'on'"),
    ("bf16: 1", "bf16: takes true or false, got the number 1"),
    ("bf16: [true]", "bf16: takes true or false, got the list [True]"),
    ("data-path: [0.5, a]", "data-path: takes text, got the number 0.5; put quotes round it"),
    ("data-path: [a, null]", "data-path: takes text, got null"),
    ("data-path: [a, -x]", "data-path: a value in a list must not start with a dash, got '-x'"),
    ("profile-ranks: []", "profile-ranks: takes a list of at least one value"),
    ("rampup-batch-size: [1, 2]", "rampup-batch-size: takes a list of 3 values, got 2"),
    ("lr-decay-style: cosin", "lr-decay-style: must be one of constant, linear, cosine, inverse-square-root, WSD, got"),
    ("timing-log-level: 7", "timing-log-level: must be one of 0, 1, 2, got the number 7"),
    ("attention-backend: fast", "attention-backend: must be one of flash, fused, unfused, local, auto, got the text"),
    ("moe-layer-freq: often", "moe-layer-freq: Megatron refuses the text 'often': invalid literal for int()"),
    ("moe-layer-freq: true", "moe-layer-freq: takes text or a number, got true"),
]


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_mistakes_name_file_line_and_key(config: Config, flags: MegatronFlags, line: str, message: str) -> None:
    path = config(f"training:\n  seed: 1\n  {line}\n")
    with pytest.raises(ValueError) as error:
        flags.argv(yaml_file.load(path))
    assert str(error.value).startswith(f"{path}:3: training.{message}")


def test_arguments_stand_in_the_order_of_the_file(config: Config, flags: MegatronFlags) -> None:
    path = config("training:\n  lr: 1\n  bf16: true\nmodel:\n  num-layers: 2\nrun:\n  name: x\ndata:\n  seed: 1\n")
    assert flags.argv(yaml_file.load(path)) == ["--lr", "1", "--bf16", "--num-layers", "2", "--seed", "1"]


@pytest.mark.parametrize(("first", "second"), [("lr: 1", "lr: 1"), ("no-fp8-wgrad: true", "disable_fp8_wgrad: true")])
def test_one_flag_in_two_sections(config: Config, flags: MegatronFlags, first: str, second: str) -> None:
    path = config(f"training:\n  {first}\nmodel:\n  {second}\n")
    with pytest.raises(ValueError) as error:
        flags.argv(yaml_file.load(path))
    name = first.partition(":")[0]
    assert f"{path}:4: model." in str(error.value)
    assert f"the same flag is already set as training.{name} ({path}:2)" in str(error.value)


def test_every_flag_has_a_rule(flags: MegatronFlags) -> None:
    """A new kind of argument in a new Megatron must be looked at, not guessed."""
    known = (argparse._StoreAction, argparse._StoreTrueAction, argparse._StoreFalseAction, argparse._StoreConstAction)
    others = {type(a) for a, _ in flags._actions.values()} - {*known, argparse.BooleanOptionalAction}
    assert others == {argparse._HelpAction}


def test_quiet_restores_logging() -> None:
    before = logging.root.manager.disable
    with pytest.raises(RuntimeError), quiet():
        raise RuntimeError
    assert logging.root.manager.disable == before


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("yaml", "No module named 'yaml': this release of Megatron imports it and does not declare it: pip install py"),
        ("megatron.training", "No module named 'megatron.training'.*set MEGATRON_LM_DIR to a Megatron-LM checkout"),
    ],
)
def test_missing_module_is_named_with_the_remedy(module: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name == "megatron.training.arguments":
                raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "megatron.training.arguments", raising=False)
    with pytest.raises(ValueError, match=problem):
        MegatronFlags.load()
