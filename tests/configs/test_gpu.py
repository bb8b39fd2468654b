"""Every configuration for GPUs: Megatron's own validation at its world size, its real model, and its plan.

On a machine without a GPU. Megatron's validation runs to its end: of a GPU it asks two things, the generation and the
capability, which an H100 answers here. What only ranks on GPUs do is not run: building Transformer Engine's layers,
loading tokenizer and data.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_loco.launch import plan
from megatron_loco.launch.megatron_checks import validate
from tests.configs._real_model import ROOT, filled_in, h100, num_parameters, validated

LLAMA_3_8B = 8_030_261_248
PARAMETERS = {
    "gpt2_345m": 354_823_168 + (50_304 - 50_257) * 1024,  # rows that Megatron pads the vocabulary with
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": LLAMA_3_8B,
    "llama3_8b_continue": LLAMA_3_8B,
    "llama3_8b_sft": LLAMA_3_8B,
    "mixtral_8x7b": 46_702_792_704,
    "deepseek_moe_16b": 16_375_728_128,
}
"""Published: the sizes of the checkpoints that their makers released."""

PLAN = re.compile(r"^#\s+megatron-loco (plan configs/.*)$", re.MULTILINE)


def gpu_configs() -> list[Path]:
    """Configurations with ``device: cuda``."""
    found = [path for path in sorted(ROOT.glob("configs/*.yaml")) if "device: cuda" in path.read_text(encoding="utf-8")]
    return [path for path in found if "hybrid" not in path.name]


CONFIGS = pytest.mark.parametrize("path", gpu_configs(), ids=lambda path: path.stem)


def test_every_configuration_has_its_number_of_parameters() -> None:
    assert {path.stem for path in gpu_configs()} == set(PARAMETERS)


def by_hand(*, layers: int, hidden: int, vocabulary: int, query: int, key_value: int, mlp: int) -> int:
    """Parameters of a LLaMA: embedding and output, two norms per layer and one at the end, attention, MLP."""
    attention = hidden * (2 * query + 2 * key_value)
    return 2 * vocabulary * hidden + hidden + layers * (2 * hidden + attention + mlp)


def test_the_published_numbers_follow_from_the_architectures() -> None:
    h = 1024
    gpt2 = (50_257 + 1024) * h + 24 * (12 * h * h + 13 * h) + 2 * h
    assert gpt2 + (50_304 - 50_257) * h == PARAMETERS["gpt2_345m"]
    for name, layers, hidden, vocabulary, groups_share, ffn in (
        ("llama2_7b", 32, 4096, 32_000, 1, 11_008),
        ("llama2_13b", 40, 5120, 32_000, 1, 13_824),
        ("llama2_70b", 80, 8192, 32_000, 8, 28_672),
        ("llama3_8b", 32, 4096, 128_256, 4, 14_336),
    ):
        key_value = hidden // groups_share
        shape = {"layers": layers, "hidden": hidden, "vocabulary": vocabulary}
        count = by_hand(**shape, query=hidden, key_value=key_value, mlp=3 * hidden * ffn)
        assert count == PARAMETERS[name]
    experts = 8 * 3 * 4096 * 14_336 + 8 * 4096  # and the router
    shape = {"layers": 32, "hidden": 4096, "vocabulary": 32_000}
    assert by_hand(**shape, query=4096, key_value=1024, mlp=experts) == PARAMETERS["mixtral_8x7b"]
    experts = (64 + 2) * 3 * 2048 * 1408 + 64 * 2048
    shape = {"layers": 28, "hidden": 2048, "vocabulary": 102_400}
    first_layer_is_dense = 3 * 2048 * 10_944 - experts
    count = by_hand(**shape, query=2048, key_value=2048, mlp=experts) + first_layer_is_dense
    assert count == PARAMETERS["deepseek_moe_16b"]


@CONFIGS
def test_megatrons_model_has_the_published_number_of_parameters(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h100(monkeypatch)
    assert num_parameters(path) == PARAMETERS[path.stem]


@pytest.mark.kind(25)
@CONFIGS
def test_megatron_validates_it_at_its_world_size(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    h100(monkeypatch)
    resolved, own = filled_in(path)
    world_size = own.run.nnodes * own.run.nproc_per_node
    assert own.loco is not None
    validate(resolved.megatron_argv, loco=own.loco, device="cuda", world_size=world_size, environment=own.environment())
    assert "note:" not in capsys.readouterr().err  # nothing was cut short
    args = validated(path)
    assert (args.world_size, args.bf16, args.use_distributed_optimizer) == (world_size, True, True)
    assert args.transformer_impl == "transformer_engine"
    model_parallel = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    assert args.data_parallel_size == world_size // model_parallel > 1
    # Overlap everywhere but with per-token losses, where LoCo does not take it.
    assert args.overlap_grad_reduce == args.overlap_param_gather == (not args.calculate_per_token_loss)


@CONFIGS
def test_plan_reads_it_and_loco_helps_on_the_cluster_that_it_names(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    (command,) = PLAN.findall(path.read_text(encoding="utf-8"))
    _, config, *words = command.split()
    assert config == f"configs/{path.name}"
    assert plan.main([config, *words]) == 0
    out = capsys.readouterr().out
    assert f"parameters: {PARAMETERS[path.stem]:,} (counted from Megatron's flags)" in out
    assert "verdict: LoCo helps." in out


@pytest.mark.parametrize("name", ["llama2_7b", "deepseek_moe_16b"])
def test_plan_sees_that_loco_does_not_help_inside_one_node(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--gpu h100 --network-gbit 400 --nodes 1 grad-reduce-in-bf16=true".split()
    assert plan.main([str(ROOT / "configs" / f"{name}.yaml"), *words]) == 0
    assert "verdict: LoCo will not help here" in capsys.readouterr().out


@CONFIGS
def test_what_every_user_has_to_set_is_told_in_one_line(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_loco.launch import __main__

    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("MEGATRON_LM_DIR", raising=False)
    lines = path.read_text(encoding="utf-8").splitlines()
    missing = {line.split(":")[0].strip(): number for number, line in enumerate(lines, 1) if ": ???" in line}
    assert {"data-path", "tokenizer-model"} <= set(missing)
    words = [f"configs/{path.name}", "run.nnodes=1", "--dry-run"]
    assert __main__.main(words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    for key, number in missing.items():
        assert f"configs/{path.name}:{number}" in line
        assert f".{key}=VALUE" in line
