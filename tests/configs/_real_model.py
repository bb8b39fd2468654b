"""The model that Megatron builds for a configuration, without memory, and its validated arguments, without a GPU."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_loco.launch import overrides, yaml_file
from megatron_loco.launch.megatron_checks import _process_state
from megatron_loco.launch.megatron_flags import MegatronFlags, quiet
from megatron_loco.launch.resolve import REQUIRED, OwnSections, Resolved, resolve
from tests.launch.test_plan import fake_ranks

ROOT = Path(__file__).parents[2]
ONE_RANK = (
    "tensor-model-parallel-size=1 sequence-parallel=false pipeline-model-parallel-size=1 "
    "num-layers-per-virtual-pipeline-stage=null expert-model-parallel-size=1 run.nnodes=1 run.nproc_per_node=1 "
    "global-batch-size=null transformer-impl=local moe-grouped-gemm=false moe-permute-fusion=false "
    "no-gradient-accumulation-fusion=true no-persist-layer-norm=true no-masked-softmax-fusion=true no-rope-fusion=true"
).split()
"""Overrides for the whole model on one rank, from PyTorch's own layers: those of Transformer Engine need a GPU. They
have the same parameters, fused into other modules."""


def filled_in(path: Path, *words: str) -> tuple[Resolved, OwnSections]:
    """Resolve a configuration; the values that every user has to set are made up, but for those in ``words``."""
    document = overrides.apply(yaml_file.load(path), words)
    settings = [(f"{name}.{key}", s.value) for name, section in document.items() for key, s in section.items()]
    made_up = [f"{name}=somewhere" for name, value in settings if value == REQUIRED]
    document = overrides.apply(document, made_up)
    own = OwnSections.read(document, config_file=str(path))
    return resolve(document, own, MegatronFlags.load(), None), own


def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer the two questions that Megatron's validation asks a GPU, as an H100 does."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *args: types.SimpleNamespace(major=9, minor=0))


def validated(path: Path, *words: str) -> Any:
    """Megatron's arguments of a configuration, after the whole of its own validation."""
    from megatron.training.arguments import parse_args, validate_args

    resolved, own = filled_in(path, *words)
    ranks = {"RANK": "0", "WORLD_SIZE": str(own.run.nnodes * own.run.nproc_per_node)}
    with _process_state(resolved.megatron_argv, {**os.environ, **own.environment(), **ranks}), quiet():
        args = parse_args()
        validate_args(args)
    return args


def num_parameters(path: Path) -> int:
    """Parameters of Megatron's ``GPTModel``, built on the meta device as its training script builds it."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.training.arguments import core_transformer_config_from_args

    from megatron_loco.launch.plan_model import padded_vocabulary

    args = validated(path, *ONE_RANK)
    config = core_transformer_config_from_args(args)
    config.use_cpu_initialization = True
    config.perform_initialization = False
    with fake_ranks(1, 0), quiet(), torch.device("meta"):
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=False),
            vocab_size=padded_vocabulary(args),
            max_sequence_length=args.max_position_embeddings,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
        )
    return sum(param.numel() for param in model.parameters())
