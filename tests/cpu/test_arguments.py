"""Flags that cannot work on CPU are named, all at once, before Megatron gets to them."""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_loco.cpu import check_arguments
from megatron_loco.cpu.arguments import DESTS

FLAGS = [
    *("--transformer-impl", "local", "--distributed-backend", "gloo", "--attention-backend", "unfused"),
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-persist-layer-norm"),
    *("--no-rope-fusion",),
]

BAD: dict[str, Any] = {
    "transformer_impl": "transformer_engine",
    "distributed_backend": "nccl",
    "pipeline_model_parallel_comm_backend": "ucc",
    "gradient_accumulation_fusion": True,
    "masked_softmax_fusion": True,
    "no_persist_layer_norm": False,
    "apply_rope_fusion": True,
    "attention_backend": "flash",
    "context_parallel_size": 2,
    "sequence_parallel": True,
    "num_experts": 4,
    "moe_token_dispatcher_type": "flex",
    "moe_enable_deepep": True,
    "moe_permute_fusion": True,
    "moe_router_fusion": True,
    "hybrid_layer_pattern": "M*",
    "hybrid_override_pattern": "M*",
    "fp8": "hybrid",
    "fp4": "e2m1",
    "cross_entropy_loss_fusion": True,
    "tp_comm_overlap": True,
    "cpu_offloading_num_layers": 1,
    "use_precision_aware_optimizer": True,
    "optimizer_cpu_offload": True,
    "optimizer_cuda_graph": True,
    "cuda_graph_impl": "local",
    "enable_cuda_graph": True,
    "external_cuda_graph": True,
    "use_torch_fsdp2": True,
    "use_megatron_fsdp": True,
    "nccl_ub": True,
    "use_sharp": True,
    "use_persistent_ckpt_worker": True,
    "record_memory_history": True,
    "log_memory_to_tensorboard": True,
    "profile": True,
}

NEEDED_BESIDE: dict[str, dict[str, Any]] = {
    "sequence_parallel": {"tensor_model_parallel_size": 2},
    "num_experts": {"tensor_model_parallel_size": 2},
    "cross_entropy_loss_fusion": {"cross_entropy_fusion_impl": "te"},
}


@pytest.fixture(scope="module")
def parsed() -> Iterator[Namespace]:
    arguments = pytest.importorskip("megatron.training.arguments")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pretrain_gpt.py", *FLAGS])
        yield arguments.parse_args()


def test_good_flags_pass(parsed: Namespace) -> None:
    check_arguments(parsed)


def test_every_attribute_that_is_looked_at_exists_in_megatron(parsed: Namespace) -> None:
    assert [dest for dest in DESTS if not hasattr(parsed, dest)] == []


def test_every_rule_has_a_bad_value_here() -> None:
    assert set(BAD) == set(DESTS)


@pytest.mark.parametrize("dest", BAD)
def test_bad_flag_is_named_alone(dest: str, parsed: Namespace) -> None:
    args = copy.copy(parsed)
    for name, value in {dest: BAD[dest], **NEEDED_BESIDE.get(dest, {})}.items():
        setattr(args, name, value)
    with pytest.raises(ValueError, match=f"  {dest}=") as error:
        check_arguments(args)
    assert str(error.value).count("\n") == 1


def test_all_bad_flags_are_in_one_error(parsed: Namespace) -> None:
    args = copy.copy(parsed)
    for values in ({**BAD}, *NEEDED_BESIDE.values()):
        for name, value in values.items():
            setattr(args, name, value)
    with pytest.raises(ValueError, match="cannot work on CPU") as error:
        check_arguments(args)
    assert [dest for dest in DESTS if f"\n  {dest}=" not in str(error.value)] == []


def test_flags_that_need_company_pass_alone(parsed: Namespace) -> None:
    args = copy.copy(parsed)
    args.sequence_parallel = True  # Megatron switches it off with one tensor parallel rank
    args.num_experts = 4
    args.cross_entropy_loss_fusion = True
    args.profile = args.use_pytorch_profiler = True
    args.hybrid_layer_pattern = "*-|*E"
    args.spec = ["megatron_loco.cpu.hybrid_specs", "hybrid_stack_local_spec"]
    check_arguments(args)


@pytest.mark.parametrize(
    ("pattern", "spec"),
    [
        ("M*", ["megatron_loco.cpu.hybrid_specs", "hybrid_stack_local_spec"]),
        ("*-", ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]),
        ("*-", None),
    ],
)
def test_hybrid_models_are_of_local_layers(pattern: str, spec: list[str] | None, parsed: Namespace) -> None:
    args = copy.copy(parsed)
    args.hybrid_layer_pattern, args.spec = pattern, spec
    with pytest.raises(ValueError, match=r"  hybrid_layer_pattern=.*--spec megatron_loco\.cpu\.hybrid_specs"):
        check_arguments(args)


def test_megatrons_defaults_are_refused() -> None:
    arguments = pytest.importorskip("megatron.training.arguments")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pretrain_gpt.py"])
        args = arguments.parse_args()
    with pytest.raises(ValueError, match="transformer_impl=transformer_engine"):
        check_arguments(args)
