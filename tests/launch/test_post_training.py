"""Frozen parameters: their names through the whole model, and patterns that match nothing or everything."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn

from megatron_loco.launch import post_training
from tests.launch.test_plan import fake_ranks


@pytest.fixture
def freeze(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Megatron's arguments, with ``freeze_params`` to set."""
    args = types.SimpleNamespace(freeze_params=None)
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    return args


def model(*, pipeline: int = 1, **changes: Any) -> nn.Module:
    """A ``GPTModel`` of four layers, of which a pipeline stage holds its share."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=4,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        **changes,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=16,
        max_sequence_length=8,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )


def frozen(built: nn.Module) -> set[str]:
    return {name for name, param in post_training.global_names(built) if not param.requires_grad}


def test_what_matches_is_frozen_as_the_model_is_built(freeze: types.SimpleNamespace) -> None:
    freeze.freeze_params = "embedding.*, decoder.layers.1.self_attention.*.weight"
    with fake_ranks(1, 0), post_training.enter():
        built = model()
    assert frozen(built) == {
        "embedding.word_embeddings.weight",
        "embedding.position_embeddings.weight",
        "decoder.layers.1.self_attention.linear_proj.weight",
        "decoder.layers.1.self_attention.linear_qkv.weight",
    }
    freeze.freeze_params = None
    with fake_ranks(1, 0), post_training.enter():
        assert not frozen(model())


def test_layers_are_numbered_through_all_pipeline_stages(freeze: types.SimpleNamespace) -> None:
    freeze.freeze_params = "decoder.layers.2.*"
    found = []
    for rank in range(2):
        with fake_ranks(2, rank, pipeline_model_parallel_size=2), post_training.enter():
            built = model(pipeline=2)
            found.append(built)
    assert not frozen(found[0])
    assert {name.split(".")[2] for name in frozen(found[1])} == {"2"}
    numbers = {name.split(".")[2] for name, _ in post_training.global_names(found[1]) if "layers." in name}
    assert numbers == {"2", "3"}
    # Local number 0, and the same with the prefixes of wrappers.
    wrapped = nn.ModuleDict({"module": nn.ModuleDict({"module": found[1]})})
    assert frozen(wrapped) == frozen(found[1])
    assert not found[1].decoder.layers[0].mlp.linear_fc1.weight.requires_grad


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("embedding.*,decoder.layers.4.*,nothing", r"no parameter is called decoder\.layers\.4\.\*, nothing"),
        ("*", "all parameters are frozen"),
        (None, None),
        ("embedding.*", None),
    ],
)
def test_patterns_are_checked_against_the_whole_model(
    freeze: types.SimpleNamespace, patterns: str | None, message: str | None
) -> None:
    freeze.freeze_params = patterns
    with fake_ranks(1, 0), post_training.enter():
        built = model()
        setup = post_training.check_patterns(lambda: ([built], "optimizer", "scheduler"))
        if message is None:
            assert setup() == ([built], "optimizer", "scheduler")
        else:
            with pytest.raises(ValueError, match=f"--freeze-params: {message}"):
                setup()


def test_the_flags_come_and_go() -> None:
    import argparse

    from megatron.training import arguments

    def options() -> set[str]:
        parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        return {option for action in parser._actions for option in action.option_strings}

    before = options()
    with post_training.enter():
        assert options() - before == {"--data-format", "--freeze-params"}
    assert options() == before
