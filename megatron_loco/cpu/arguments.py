"""Which of Megatron's flags cannot work on CPU, and what to write instead."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Rule:
    dest: str
    is_bad: Callable[[Any, Namespace], bool]
    remedy: str


def _is_set(value: Any, _args: Namespace) -> bool:
    return bool(value)


def _is_unset(value: Any, _args: Namespace) -> bool:
    return not value


def _other_than(*allowed: Any) -> Callable[[Any, Namespace], bool]:
    return lambda value, _args: value is not None and value not in allowed


def _other_than_local_hybrid(value: Any, args: Namespace) -> bool:
    return bool(value) and (not set(value) <= set("*-E|") or getattr(args, "spec", None) != _HYBRID_SPEC)


def _with_tensor_parallelism(value: Any, args: Namespace) -> bool:
    return bool(value) and getattr(args, "tensor_model_parallel_size", 1) > 1


_HYBRID_SPEC = ["megatron_loco.cpu.hybrid_specs", "hybrid_stack_local_spec"]
_NEEDS_TE = "needs Transformer Engine"
_NO_GRAPHS = "there are no CUDA graphs"

_RULES = (
    _Rule("transformer_impl", _other_than("local"), "--transformer-impl local (the others need Transformer Engine)"),
    _Rule("distributed_backend", _other_than("gloo"), "--distributed-backend gloo"),
    _Rule("pipeline_model_parallel_comm_backend", _other_than("gloo"), "drop it; the pipeline uses gloo too"),
    _Rule("gradient_accumulation_fusion", _is_set, "--no-gradient-accumulation-fusion (a CUDA extension)"),
    _Rule("masked_softmax_fusion", _is_set, "--no-masked-softmax-fusion (a CUDA extension)"),
    _Rule("no_persist_layer_norm", _is_unset, "--no-persist-layer-norm (torch norms have no such kernel)"),
    _Rule("apply_rope_fusion", _is_set, f"--no-rope-fusion ({_NEEDS_TE})"),
    _Rule(
        "attention_backend",
        lambda value, _args: getattr(value, "name", value) in ("flash", "fused"),
        "--attention-backend unfused (it would be ignored without a word)",
    ),
    _Rule("context_parallel_size", _other_than(1), f"--context-parallel-size 1 (attention over ranks {_NEEDS_TE})"),
    _Rule("sequence_parallel", _with_tensor_parallelism, "drop it; torch norms refuse sequence parallelism"),
    _Rule(
        "num_experts",
        _with_tensor_parallelism,
        "--tensor-model-parallel-size 1 (experts with tensor parallelism need sequence parallelism, which torch norms "
        "refuse; use --expert-model-parallel-size)",
    ),
    _Rule("moe_token_dispatcher_type", _other_than("allgather", "alltoall"), "--moe-token-dispatcher-type alltoall"),
    _Rule("moe_enable_deepep", _is_set, "drop it; DeepEP needs GPUs"),
    _Rule("moe_permute_fusion", _is_set, f"drop it; it {_NEEDS_TE}"),
    _Rule("moe_router_fusion", _is_set, f"drop it; it {_NEEDS_TE}"),
    _Rule(
        "hybrid_layer_pattern",
        _other_than_local_hybrid,
        f"only *, -, E and |, and with --spec {' '.join(_HYBRID_SPEC)} (other layers need GPUs, Megatron's own spec "
        "Transformer Engine)",
    ),
    _Rule("hybrid_override_pattern", _is_set, "--hybrid-layer-pattern, which 0.18 has"),
    _Rule("fp8", _is_set, f"drop --fp8-format; it {_NEEDS_TE}"),
    _Rule("fp4", _is_set, f"drop --fp4-format; it {_NEEDS_TE}"),
    _Rule(
        "cross_entropy_loss_fusion",
        lambda value, args: bool(value) and getattr(args, "cross_entropy_fusion_impl", None) == "te",
        "--cross-entropy-fusion-impl native",
    ),
    _Rule("tp_comm_overlap", _is_set, f"drop it; it {_NEEDS_TE}"),
    _Rule("cpu_offloading_num_layers", _is_set, f"drop it; it {_NEEDS_TE}, and all is on the CPU"),
    _Rule("use_precision_aware_optimizer", _is_set, f"drop it; it {_NEEDS_TE}"),
    _Rule("optimizer_cpu_offload", _is_set, "drop it; the optimizer is on the CPU"),
    _Rule("optimizer_cuda_graph", _is_set, f"drop it; {_NO_GRAPHS}"),
    _Rule("cuda_graph_impl", _other_than("none"), f"--cuda-graph-impl none; {_NO_GRAPHS}"),
    _Rule("enable_cuda_graph", _is_set, f"drop it; {_NO_GRAPHS}"),
    _Rule("external_cuda_graph", _is_set, f"drop it; {_NO_GRAPHS}"),
    _Rule("use_torch_fsdp2", _is_set, "--use-distributed-optimizer (its device mesh is on cuda)"),
    _Rule("use_megatron_fsdp", _is_set, "--use-distributed-optimizer (its device mesh is on cuda)"),
    _Rule("nccl_ub", _is_set, "drop --use-nccl-ub; there is no NCCL"),
    _Rule("use_sharp", _is_set, "drop it; there is no NCCL"),
    _Rule("use_persistent_ckpt_worker", _is_set, "drop it; the worker is a fresh process, which finds no CUDA device"),
    _Rule("record_memory_history", _is_set, "drop it; there is no CUDA memory"),
    _Rule("log_memory_to_tensorboard", _is_set, "drop it; there is no CUDA memory"),
    _Rule(
        "profile",
        lambda value, args: bool(value) and not getattr(args, "use_pytorch_profiler", False),
        "add --use-pytorch-profiler (the other profiler is Nsight)",
    ),
)

DESTS = tuple(rule.dest for rule in _RULES)
"""Attributes of Megatron's namespace that are looked at, by the ``dest`` of their flags."""


def check_arguments(args: Namespace) -> None:
    """Refuse flags that cannot work on CPU, before any process group is made.

    Args:
        args: Megatron's parsed arguments, before or after its validation. An attribute that the release does not have
            is passed over.

    Raises:
        ValueError: at least one flag cannot work; the message names each with its value and what to write instead.
    """
    problems = [
        f"{rule.dest}={getattr(args, rule.dest)}: {rule.remedy}"
        for rule in _RULES
        if hasattr(args, rule.dest) and rule.is_bad(getattr(args, rule.dest), args)
    ]
    if problems:
        raise ValueError("these Megatron arguments cannot work on CPU:\n  " + "\n  ".join(problems))
