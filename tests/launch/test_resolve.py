"""The launcher's defaults, what contradicts them, and the round trip of the resolved file."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_loco.config import LoCoConfig
from megatron_loco.launch import overrides, run_config, yaml_file
from megatron_loco.launch.corpus import PreparedCorpus
from megatron_loco.launch.megatron_checks import validate
from megatron_loco.launch.megatron_flags import MegatronFlags
from megatron_loco.launch.resolve import OwnSections, Resolved, resolve

Config = Callable[[str], str]
QUICKSTART = Path(__file__).parents[2] / "configs" / "llama_quickstart.yaml"
CORPUS = PreparedCorpus(name="stdlib", folder="data/stdlib-x", tokens=3)


def resolved(
    path: str | Path, flags: MegatronFlags, *words: str, device: str = "cpu", corpus: PreparedCorpus | None = None
) -> Resolved:
    document = overrides.apply(yaml_file.load(path), words)
    own = OwnSections.read(document, config_file=str(path))
    if own.run.device == "auto":
        own = dataclasses.replace(own, run=dataclasses.replace(own.run, device=device))
    return resolve(document, own, flags, corpus)


def test_defaults_only_where_the_file_is_silent(config: Config, flags: MegatronFlags) -> None:
    path = config("training:\n  train-iters: 7\n")
    argv = resolved(path, flags).argv
    assert argv[argv.index("--tensorboard-dir") + 1] == "runs/small/tensorboard"
    assert argv[argv.index("--save") + 1] == "runs/small/checkpoints"
    assert argv[argv.index("--save-interval") + 1] == "7"
    assert argv[argv.index("--distributed-backend") + 1] == "gloo"
    assert "--distributed-backend" not in resolved(path, flags, device="cuda").argv
    argv = resolved(path, flags, "tensorboard-dir=tb", "save=null", "distributed-backend=gloo").argv
    assert argv == ["--train-iters", "7", "--tensorboard-dir", "tb", "--distributed-backend", "gloo"]


def test_nccl_on_cpu_is_refused(config: Config, flags: MegatronFlags) -> None:
    path = config("parallel:\n  distributed-backend: nccl\n")
    with pytest.raises(ValueError, match=r":2: parallel\.distributed-backend: run\.device is cpu, which needs gloo"):
        resolved(path, flags)
    assert "nccl" in resolved(path, flags, device="cuda").argv


def test_the_corpus_supplies_data_and_tokenizer(config: Config, flags: MegatronFlags) -> None:
    path = config("run:\n  corpus: stdlib\ndata:\n  data-cache-path: mine\n  tokenizer-type: null\n")
    result = resolved(path, flags, corpus=CORPUS)
    assert result.sections["data"] == {
        "data-cache-path": "mine",
        "tokenizer-type": "NullTokenizer",
        "vocab-size": 257,
        "data-path": "data/stdlib-x/text_document",
    }
    assert result.sections["run"]["corpus"] is None
    before = resolved(path, flags)
    assert before.sections["run"]["corpus"] == "stdlib"
    assert "data-path" not in before.sections["data"]
    assert "prepared at the start" in before.argv[before.argv.index("--data-path") + 1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("data-path: x", "data.data-path: run.corpus is stdlib and supplies the data; set one of the two"),
        ("train-data-path: [x]", "data.train-data-path: run.corpus is stdlib and supplies the data"),
        ("mock-data: true", "data.mock-data: run.corpus is stdlib and supplies the data"),
        ("vocab-size: 300", "data.vocab-size: run.corpus stdlib holds bytes and needs 257; leave the key out"),
        (
            "tokenizer-type: TikTokenizer",
            "data.tokenizer-type: run.corpus stdlib holds bytes and needs 'NullTokenizer'",
        ),
    ],
)
def test_what_contradicts_the_corpus(config: Config, flags: MegatronFlags, line: str, message: str) -> None:
    path = config(f"run:\n  corpus: stdlib\ndata:\n  {line}\n")
    with pytest.raises(ValueError) as error:
        resolved(path, flags, corpus=CORPUS)
    assert str(error.value).startswith(f"{path}:4: {message}")


@pytest.mark.kind(34)
@pytest.mark.parametrize("corpus", [None, CORPUS])
@pytest.mark.parametrize("words", [(), ("loco.bits=off", "run.name=3 x", "save=null", "env.A='1'", "data.seed=1")])
def test_the_resolved_file_gives_the_same_run(
    tmp_path: Path, flags: MegatronFlags, words: tuple[str, ...], corpus: PreparedCorpus | None
) -> None:
    first = resolved(QUICKSTART, flags, *words, corpus=corpus)
    path = tmp_path / "resolved.yaml"
    path.write_text(first.as_yaml(comment="two\nlines"), encoding="utf-8")
    second = resolved(path, flags, device="cuda")  # not taken: the device is settled in the file
    assert second.argv == first.argv
    assert second.sections == first.sections


@pytest.mark.kind(25)
def test_quickstart_passes_megatrons_validation(flags: MegatronFlags) -> None:
    result = resolved(QUICKSTART, flags, corpus=CORPUS)
    validate(result.megatron_argv, loco=None, device="cpu", world_size=2, environment=os.environ)
    assert result.argv[len(result.megatron_argv) :][:2] == ["--loco-bits", "4"]
    assert resolved(QUICKSTART, flags, "loco.bits=off", corpus=CORPUS).argv == result.megatron_argv


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["global-batch-size=15"], "must be divisible by"),
        (["save-interval=null"], "AssertionError at: assert args.save_interval is not None"),
        (["use-distributed-optimizer=false"], "overlap"),
    ],
)
def test_megatron_refuses(flags: MegatronFlags, words: list[str], message: str) -> None:
    argv, environment = list(sys.argv), dict(os.environ)
    with pytest.raises(ValueError, match=f"Megatron refuses these settings: .*{message}"):
        validate(
            resolved(QUICKSTART, flags, *words).megatron_argv,
            loco=None,
            device="cpu",
            world_size=2,
            environment=os.environ,
        )
    assert sys.argv == argv
    assert dict(os.environ) == environment


def test_loco_and_the_device_refuse_before_anything_is_prepared(flags: MegatronFlags) -> None:
    def check(word: str, loco: LoCoConfig | None) -> None:
        argv = resolved(QUICKSTART, flags, word).megatron_argv
        validate(argv, loco=loco, device="cpu", world_size=2, environment=os.environ)

    with pytest.raises(ValueError, match=r"--calculate-per-token-loss: .*remove --overlap-grad-reduce"):
        check("calculate-per-token-loss=true", LoCoConfig(bits=4))
    check("calculate-per-token-loss=true", None)
    with pytest.raises(ValueError, match=r"transformer_impl=transformer_engine: --transformer-impl local"):
        check("transformer-impl=transformer_engine", None)


def test_device_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_config.RunConfig(name="x")
    for available, device in [(True, "cuda"), (False, "cpu")]:
        monkeypatch.setattr("torch.cuda.is_available", lambda available=available: available)
        assert run_config.settle_device(run).device == device
    assert run_config.settle_device(dataclasses.replace(run, device="cuda")).device == "cuda"


# --------------------------------------------------------------------------------- the baseline, by one switch

MIXED = """
loco:
  bits: 4
  block_size: 128
precision:
  bf16: true
training:
  train-iters: 7
"""


@pytest.mark.parametrize(("word", "flag"), [("run.baseline=bf16", True), ("run.baseline=fp32", False)])
@pytest.mark.parametrize("given", ["", "  grad-reduce-in-bf16: true\n", "  grad-reduce-in-bf16: false\n"])
def test_one_word_switches_to_the_baseline(
    config: Config, flags: MegatronFlags, tmp_path: Path, word: str, flag: bool, given: str
) -> None:
    path = config(MIXED.replace("  bf16: true\n", "  bf16: true\n" + given))
    result = resolved(path, flags, word)
    assert ("--grad-reduce-in-bf16" in result.argv) == flag
    assert not any(argument.startswith("--loco") for argument in result.argv)
    assert result.sections["loco"] == {"bits": "off"}
    assert result.sections["precision"]["grad-reduce-in-bf16"] is flag
    # The same as by hand.
    by_hand = resolved(path, flags, "loco.bits=off", f"precision.grad-reduce-in-bf16={str(flag).lower()}")
    assert sorted(by_hand.argv) == sorted(result.argv)
    # The resolved file says so and gives the same run; without the switch it is no other run either.
    again = tmp_path / "resolved.yaml"
    again.write_text(result.as_yaml(), encoding="utf-8")
    assert resolved(again, flags).sections == result.sections
    assert resolved(again, flags, "run.baseline=null").argv == result.argv


@pytest.mark.parametrize(
    ("words", "content", "message"),
    [
        (
            ["run.baseline=bf16", "loco.bits=4"],
            MIXED,
            r"command line: loco\.bits: run\.baseline is bf16 \(command line\)",
        ),
        ([], "run:\n  baseline: fp32\n" + MIXED, r":5: loco\.bits: run\.baseline is fp32 \(.*:2\)"),
        (["loco.bits=8"], "run:\n  baseline: fp32\nprecision:\n  bf16: true\n", r"command line: loco\.bits: "),
        (
            ["run.baseline=bf16", "grad-reduce-in-bf16=false"],
            MIXED,
            r"command line: training\.grad-reduce-in-bf16: run\.baseline is bf16, but this says otherwise",
        ),
        (["run.baseline=fp32"], MIXED.replace("bf16", "fp16"), r"precision\.fp16: run\.baseline is fp32, but then"),
        (
            ["run.baseline=bf16", "accumulate-allreduce-grads-in-fp32=true"],
            MIXED,
            r"training\.accumulate-allreduce-grads-in-fp32: run\.baseline is bf16",
        ),
        (["run.baseline=fp32", "main-grads-dtype=bf16"], MIXED, r"training\.main-grads-dtype: .* in another type"),
        (
            ["run.baseline=bf16", "bf16=false"],
            MIXED,
            r"command line: run\.baseline: gradients of fp32 parameters are reduced in fp32",
        ),
        (["run.baseline=fp16"], MIXED, r"command line: run\.baseline: baseline must be one of bf16, fp32, got 'fp16'"),
    ],
)
def test_what_contradicts_the_baseline(
    config: Config, flags: MegatronFlags, words: list[str], content: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resolved(config(content), flags, *words)


def test_a_baseline_without_a_loco_section_and_loco_off_are_no_contradiction(
    config: Config, flags: MegatronFlags
) -> None:
    path = config("precision:\n  bf16: true\n")
    assert "--grad-reduce-in-bf16" in resolved(path, flags, "run.baseline=bf16").argv
    assert "--grad-reduce-in-bf16" in resolved(path, flags, "run.baseline=bf16", "loco.bits=off").argv


# ----------------------------------------------------------------- required values, and our own script's settings


def test_every_missing_value_is_named_at_once(config: Config, flags: MegatronFlags) -> None:
    path = config("data:\n  data-path: ???\n  tokenizer-model: ???\nenv:\n  NCCL_IB_HCA: ???\n")
    with pytest.raises(ValueError) as error:
        resolved(path, flags)
    message = str(error.value)
    assert message.startswith(f"{path}:2: data.data-path is for you to set, and data.tokenizer-model ({path}:3)")
    assert message.endswith(
        "by data.data-path=VALUE data.tokenizer-model=VALUE env.NCCL_IB_HCA=VALUE on the command line"
    )
    words = ["data.data-path=['0.5', a, '0.5', b]", "tokenizer-model=t", "env.NCCL_IB_HCA=mlx5"]
    argv = resolved(path, flags, *words, device="cuda").argv
    assert argv[argv.index("--data-path") + 1 :][:4] == ["0.5", "a", "0.5", "b"]
    with pytest.raises(ValueError, match=r"data\.data-path is for you to set"):
        resolved(path, flags, "data.data-path=[a, '???']", *words[1:])


def test_conversations_and_frozen_parameters_reach_our_script(
    config: Config, flags: MegatronFlags, tmp_path: Path
) -> None:
    path = config("run:\n  corpus: stdlib-chat\n  freeze: embedding.*\nloco:\n  bits: 4\n")
    result = resolved(path, flags, corpus=dataclasses.replace(CORPUS, name="stdlib-chat"))
    assert result.argv[-4:] == ["--data-format", "chat", "--freeze-params", "embedding.*"]
    assert "--data-format" not in result.megatron_argv  # which Megatron's own parser checks
    assert result.sections["run"]["corpus"] is None
    assert result.sections["run"]["data_format"] == "chat"
    assert result.sections["data"]["vocab-size"] == 259
    again = tmp_path / "resolved.yaml"
    again.write_text(result.as_yaml(), encoding="utf-8")
    assert resolved(again, flags).argv == result.argv
    before = resolved(path, flags)
    assert (before.sections["run"]["corpus"], before.argv[-4:]) == ("stdlib-chat", result.argv[-4:])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("corpus: stdlib\n  data_format: chat", r":3: run\.data_format: run\.corpus is stdlib, which holds text"),
        ("data_format: jsonl", r":2: run\.data_format: data_format must be one of text, chat, got 'jsonl'"),
        ("freeze: 'a,,b'", r":2: run\.freeze: freeze must be patterns with commas between"),
        (
            "data_format: chat\ndata:\n  mock-data: true",
            r":4: data\.mock-data: run\.data_format is chat; made-up data have no roles",
        ),
    ],
)
def test_settings_of_our_script_that_make_no_sense(
    config: Config, flags: MegatronFlags, content: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resolved(config(f"run:\n  {content}\n"), flags)


@pytest.mark.parametrize("where", ["environment", "file"])
def test_a_checkouts_script_does_not_know_them(
    config: Config, flags: MegatronFlags, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    content = "run:\n  freeze: a\n  data_format: chat\n"
    if where == "environment":
        monkeypatch.setenv("MEGATRON_LM_DIR", "/checkout")
    else:
        content += "env:\n  MEGATRON_LM_DIR: /checkout\n"
    with pytest.raises(ValueError, match=r"run\.data_format, run\.freeze: only our own training script"):
        resolved(config(content), flags)
