"""The two configurations of hybrid models: Megatron's own validation, and the same model as their GPT twins.

On a machine without a GPU, as in :mod:`test_gpu`: Transformer Engine's layers are not built, PyTorch's are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_loco.launch import checkout, yaml_file
from megatron_loco.launch.megatron_checks import validate
from megatron_loco.launch.megatron_flags import quiet
from tests.configs._real_model import ONE_RANK, ROOT, filled_in, h100, num_parameters, validated
from tests.launch.test_plan import fake_ranks

TWINS = {"llama_hybrid": "llama3_8b", "moe_hybrid": "mixtral_8x7b"}
CONFIGS = pytest.mark.parametrize(
    ("path", "twin"), [(ROOT / f"configs/{a}.yaml", ROOT / f"configs/{b}.yaml") for a, b in TWINS.items()], ids=TWINS
)
ONLY_HYBRID = {"run.script", "model.hybrid-layer-pattern", "model.spec"}
ONLY_GPT = {"model.num-layers", "parallel.num-layers-per-virtual-pipeline-stage"}


def settings(path: Path) -> dict[str, Any]:
    """Every setting of a file by its full name."""
    document = yaml_file.load(path)
    return {f"{name}.{key}": setting.value for name, section in document.items() for key, setting in section.items()}


@CONFIGS
def test_settings_are_those_of_the_gpt_model(path: Path, twin: Path) -> None:
    mine, theirs = settings(path), settings(twin)
    assert mine.keys() - theirs.keys() == ONLY_HYBRID
    assert theirs.keys() - mine.keys() <= ONLY_GPT
    assert [key for key in mine.keys() & theirs.keys() if mine[key] != theirs[key]] == []
    pattern = mine["model.hybrid-layer-pattern"]
    assert pattern.replace("|", "") == theirs["model.num-layers"] * ("*E" if "E" in pattern else "*-")


@pytest.mark.kind(25)
@CONFIGS
def test_megatron_validates_it_at_its_world_size(
    path: Path, twin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    h100(monkeypatch)
    resolved, own = filled_in(path)
    (tmp_path / "pretrain_hybrid.py").touch()
    script = checkout.training_script({"MEGATRON_LM_DIR": str(tmp_path)}, own.run.script)
    assert script == tmp_path / "pretrain_hybrid.py"
    world_size = own.run.nnodes * own.run.nproc_per_node
    validate(resolved.megatron_argv, loco=own.loco, device="cuda", world_size=world_size, environment=own.environment())
    assert "note:" not in capsys.readouterr().err  # nothing was cut short
    args = validated(path)
    checkout.check_script(args, script)
    assert args.spec == ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]
    expected = validated(twin)
    for name in (
        *("world_size", "data_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
        *("virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "overlap_grad_reduce"),
    ):
        assert getattr(args, name) == getattr(expected, name), name
    assert args.num_layers == 2 * expected.num_layers


@CONFIGS
def test_the_model_has_as_many_parameters_as_the_gpt_model(
    path: Path, twin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = settings(path)["model.hybrid-layer-pattern"].replace("|", "")
    with monkeypatch.context() as gpu:
        h100(gpu)
        expected = num_parameters(twin)
        args = validated(path, *ONE_RANK, f"hybrid-layer-pattern='{pattern}'")
    with fake_ranks(1, 0), quiet(), torch.device("meta"):
        from megatron.core.models.hybrid.hybrid_model import HybridModel
        from megatron.training.arguments import core_transformer_config_from_args

        from megatron_loco.cpu.hybrid_specs import hybrid_stack_local_spec
        from megatron_loco.launch.plan_model import padded_vocabulary

        config = core_transformer_config_from_args(args)
        config.use_cpu_initialization = True
        config.perform_initialization = False
        model = HybridModel(
            config=config,
            hybrid_stack_spec=hybrid_stack_local_spec,
            vocab_size=padded_vocabulary(args),
            max_sequence_length=args.max_position_embeddings,
            hybrid_layer_pattern=args.hybrid_layer_pattern,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
        )
        assert sum(param.numel() for param in model.parameters()) == expected
