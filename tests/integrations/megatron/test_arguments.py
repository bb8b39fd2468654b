"""``--loco-*`` on Megatron's real parser and in its real validation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_loco import cpu, patch
from megatron_loco.config import LoCoConfig, fields, flag
from megatron_loco.integrations.megatron.arguments import check_combinations, config_from_args

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
        (
            ("--loco-bits", "4", "--calculate-per-token-loss", "--overlap-grad-reduce"),
            "remove --overlap-grad-reduce",
        ),
        (
            (
                *("--loco-bits", "4", "--loco-error-bits", "0", "--loco-scale-mode", "fixed"),
                *("--calculate-per-token-loss", "--overlap-grad-reduce"),
            ),
            "remove --overlap-grad-reduce",
        ),
        (("--loco-bits", "4", "--rerun-mode", "report_stats"), "add --loco-rollback restore"),
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
            "--rerun-mode",
            "report_stats",
            "--ddp-reduce-scatter-with-fp32-accumulation",
            without="--use-distributed-optimizer",
        )
    message = str(caught.value)
    named = ("--rerun-mode", "--use-distributed-optimizer", "--ddp-reduce-scatter-with-fp32-accumulation")
    assert all(name in message for name in named)


def test_local_checkpoints_would_lose_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    args = parsed(monkeypatch, "--loco-bits", "4")
    # Set by hand: to accept the flag Megatron needs a package that is not installed here.
    args.non_persistent_ckpt_type = "local"
    with pytest.raises(ValueError, match=r"--non-persistent-ckpt-type: .*add --loco-save-error never"):
        check_combinations(args)
    args.loco_save_error = "never"
    check_combinations(args)
    args.non_persistent_ckpt_type, args.loco_save_error = "global", "always"
    check_combinations(args)


@pytest.mark.parametrize("optimizer", ["lion", "muon", "soap"])
def test_layer_wise_optimizers_are_refused_for_what_they_are(monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    # Megatron turns --use-distributed-optimizer off for them; to ask for that flag again would lead in a circle.
    with pytest.raises(ValueError) as caught:
        parsed(monkeypatch, "--loco-bits", "4", "--optimizer", optimizer)
    assert "--optimizer: Megatron runs it layer by layer" in str(caught.value)
    assert "--use-distributed-optimizer:" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ("--fp16",),
        ("--calculate-per-token-loss",),
        ("--calculate-per-token-loss", "--overlap-grad-reduce", "--loco-error-bits", "0"),
        ("--rerun-mode", "report_stats", "--loco-rollback", "restore"),
        ("--rerun-mode", "report_stats", "--loco-error-bits", "0"),
    ],
)
def test_what_the_error_follows(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    without = "--bf16" if "--fp16" in words else ""
    assert config_from_args(parsed(monkeypatch, "--loco-bits", "4", *words, without=without)) is not None


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
