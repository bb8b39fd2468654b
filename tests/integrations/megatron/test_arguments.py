"""``--loco-*`` on Megatron's real parser and in its real validation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_loco import cpu, patch
from megatron_loco.config import LoCoConfig, fields, flag
from megatron_loco.integrations.megatron.arguments import config_from_args

BASE = (
    "--transformer-impl local --distributed-backend gloo --num-layers 2 --hidden-size 64 --num-attention-heads 4"
    " --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --train-iters 10 --lr 1e-3 --bf16"
    " --tokenizer-type NullTokenizer --vocab-size 255 --no-gradient-accumulation-fusion --no-masked-softmax-fusion"
    " --no-persist-layer-norm --no-rope-fusion --use-distributed-optimizer"
).split()


@pytest.fixture(scope="module", autouse=True)
def _patched() -> Iterator[None]:
    with cpu.enter(), patch():
        yield


def parsed(monkeypatch: pytest.MonkeyPatch, *words: str, without: str = "", world_size: int = 2) -> Any:
    """Megatron's namespace after its own parsing and validation."""
    from megatron.training import arguments

    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setattr(sys, "argv", ["train", *(word for word in BASE if word != without), *words])
    args = arguments.parse_args()
    arguments.validate_args(args, {})
    return args


def test_defaults_are_those_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_from_args(parsed(monkeypatch, "--loco-bits", "4")) == LoCoConfig(bits=4)


def test_every_knob_reaches_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = LoCoConfig(bits=8, block_size=64, beta=0.5, reset_interval=7, warmup_steps=3, backend="reference")
    words = [word for name, *_ in fields() for word in (flag(name), str(getattr(wanted, name)))]
    assert config_from_args(parsed(monkeypatch, *words)) == wanted


@pytest.mark.parametrize("words", [(), ("--loco-bits", "off"), ("--loco-bits", "off", "--loco-beta", "0.5")])
def test_off(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    assert config_from_args(parsed(monkeypatch, *words)) is None


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--loco-beta", "0.5"), "--loco-beta has no effect without --loco-bits"),
        (("--loco-bits", "5"), "--loco-bits must be one of 1, 2, 4, 8, 32"),
        (("--loco-bits", "4", "--loco-beta", "1"), "--loco-beta must be"),
        (("--loco-bits", "4", "--loco-block-size", "100"), "--loco-block-size must be a multiple of 32"),
        (("--loco-bits", "4", "--loco-warmup-steps", "-1"), "--loco-warmup-steps must not be negative"),
        (("--loco-bits", "4", "--calculate-per-token-loss"), "--calculate-per-token-loss"),
        (("--loco-bits", "4", "--rerun-mode", "report_stats"), "--rerun-mode"),
        (("--loco-bits", "4", "--num-distributed-optimizer-instances", "2"), "--num-distributed-optimizer-instances"),
        (
            ("--loco-bits", "4", "--ddp-reduce-scatter-with-fp32-accumulation"),
            "--ddp-reduce-scatter-with-fp32-accumulation",
        ),
        (("--loco-bits", "4", "--use-nccl-ub"), "--use-nccl-ub"),
    ],
)
def test_refused(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], part: str) -> None:
    with pytest.raises(ValueError) as caught:
        parsed(monkeypatch, *words)
    assert part in str(caught.value)


def test_all_problems_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError) as caught:
        parsed(
            monkeypatch,
            "--loco-bits",
            "4",
            "--calculate-per-token-loss",
            "--optimizer",
            "lion",
            without="--use-distributed-optimizer",
        )
    message = str(caught.value)
    assert all(name in message for name in ("--calculate-per-token-loss", "--use-distributed-optimizer", "--optimizer"))


def test_fp16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError) as caught:
        parsed(monkeypatch, "--loco-bits", "4", "--fp16", without="--bf16")
    assert "--fp16" in str(caught.value)
    assert "--bf16" in str(caught.value)


def test_megatrons_yaml_cannot_switch_it_off_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import arguments

    monkeypatch.setattr(sys, "argv", ["train", "--yaml-cfg", "some.yaml", "--loco-bits", "4"])
    with pytest.raises(ValueError, match="--yaml-cfg"):
        arguments.parse_args()


def test_help_names_every_flag_and_default() -> None:
    from megatron.training import arguments

    text = arguments.add_megatron_arguments(argparse.ArgumentParser()).format_help()
    section = " ".join(text[text.index("LoCo:") :].split())
    for name, _, default, _ in fields():
        assert flag(name) in section
        assert default is None or f"Default: {default}." in section
