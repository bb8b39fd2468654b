"""The parameters of a model, counted from Megatron's flags without building it: what one rank holds, and in all.

For GPT models of decoder layers: dense and mixture-of-experts, with or without biases, gated or plain MLP,
grouped-query attention, tied or separate output layer. Shapes are those of Megatron-core's ``GPTModel``; a test
compares them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_NOT_COUNTED = {
    "multi_latent_attention": False,
    "mtp_num_layers": None,
    "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None,
    "heterogeneous_layers_config_path": None,
    "heterogeneous_layers_config_encoded_json": None,
    "pipeline_model_parallel_layout": None,
    "experimental_attention_variant": None,
    "attention_output_gate": False,
    "moe_latent_size": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "tensor_parallel_num_weight_shards": None,
    "expert_tensor_parallel_num_weight_shards": None,
    "spec": None,
}
"""Flags under which a model has other parameters or pipeline stages than are counted here, with their defaults."""

_SYNTHETIC_NUMEL = 2**24


@dataclass(frozen=True)
class Param:
    """A parameter as one rank holds it.

    Attributes:
        name: As in the model.
        numel: Elements on the rank.
        num_dimensions: Of its shape.
        is_expert: Whether it belongs to an expert that the router chooses.
        own_group: Whether it is reduced over a group of the experts: Megatron has one if they are parallel (EP > 1).
        copies: How many different ones the ranks of a pipeline stage hold (TP, for experts their TP x EP).
    """

    name: str
    numel: int
    num_dimensions: int = 2
    is_expert: bool = False
    own_group: bool = False
    copies: int = 1


@dataclass(frozen=True)
class Model:
    """A model as it is spread over ranks.

    Attributes:
        stages: Parameters of one rank of each pipeline stage, in the order of the model.
        total: Parameters of the model; those that several ranks hold a copy of count once.
        active: Those that a token passes through: of the experts only the chosen ones.
        source: Where the numbers come from, for the report.
    """

    stages: tuple[tuple[Param, ...], ...] = field(repr=False)
    total: int
    active: float
    source: str

    @property
    def largest_stage(self) -> int:
        """The pipeline stage whose ranks hold most elements, and so send most."""
        sizes = [sum(param.numel for param in stage) for stage in self.stages]
        return sizes.index(max(sizes))


def model_of_size(total: int, *, tensor: int, pipeline: int) -> Model:
    """A model of which only the size is known: matrices of at most 16.8 M elements, in equal shares for all ranks.

    Raises:
        ValueError: the model has fewer parameters than ranks to hold them.
    """
    numel = total // (tensor * pipeline)
    if numel < 1:
        raise ValueError(f"--params {total} is less than --tp x --pp = {tensor * pipeline}")
    sizes = [_SYNTHETIC_NUMEL] * (numel // _SYNTHETIC_NUMEL) + [numel % _SYNTHETIC_NUMEL]
    stage = tuple(Param(f"matrix{k}", size, copies=tensor) for k, size in enumerate(sizes) if size)
    return Model((stage,) * pipeline, total, float(total), "--params; all of it taken for matrices, none exact")


def model_from_args(args: Any) -> Model:
    """Count the parameters of the GPT model that Megatron's flags describe.

    Args:
        args: Megatron's parsed arguments; they need not have passed its validation.

    Raises:
        ValueError: a flag that sizes the model is missing, or the model is of a kind that is not counted.
    """
    for name, default in _NOT_COUNTED.items():
        if getattr(args, name, default) != default:
            raise ValueError(
                f"--{name.replace('_', '-')}: plan does not count the parameters of such a model; "
                "give their number instead: --params N --tokens-per-gpu N"
            )
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if getattr(args, name) is None:
            raise ValueError(f"--{name.replace('_', '-')} is missing; plan needs it to count parameters")
    counter = _Counter(args)
    layers = range(args.num_layers)
    stages = []
    first = 0
    for stage, count in enumerate(_layers_per_stage(args)):
        own = [p for layer in layers[first : first + count] for p in counter.layer(layer)]
        first += count
        is_last = stage == args.pipeline_model_parallel_size - 1
        stages.append((*(counter.embedding() if stage == 0 else ()), *own, *(counter.head(stage) if is_last else ())))
    everything = [p for stage in stages for p in stage if not p.name.endswith("output_layer.copy")]
    total = sum(p.numel * p.copies for p in everything)
    idle = sum(p.numel * p.copies for p in everything if p.is_expert)
    share = 0.0 if args.num_experts is None else 1 - min(1.0, args.moe_router_topk / args.num_experts)
    return Model(tuple(stages), total, total - idle * share, "counted from Megatron's flags")


def padded_vocabulary(args: Any) -> int:
    """The rows of the embedding: the vocabulary rounded up, as Megatron does.

    Raises:
        ValueError: the size of the vocabulary is not among the flags.
    """
    if args.padded_vocab_size:
        return int(args.padded_vocab_size)
    if args.vocab_size is None:
        raise ValueError(
            "--vocab-size is missing, and plan does not load tokenizers; add vocab-size=N (the tokenizer's size)"
        )
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return int(-(-args.vocab_size // multiple) * multiple)


def _layers_per_stage(args: Any) -> list[int]:
    stages, layers = args.pipeline_model_parallel_size, args.num_layers
    ends = {0: args.decoder_first_pipeline_num_layers, stages - 1: args.decoder_last_pipeline_num_layers}
    given = {stage: count for stage, count in ends.items() if count is not None} if stages > 1 else {}
    others = stages - len(given)
    rest = layers - sum(given.values())
    if rest < 0 or (others and rest % others) or (not others and rest):
        raise ValueError(f"--num-layers {layers} cannot be spread over --pipeline-model-parallel-size {stages}")
    return [given.get(stage, rest // others if others else 0) for stage in range(stages)]


class _Counter:
    def __init__(self, args: Any) -> None:
        self.args = args
        self.hidden: int = args.hidden_size
        self.tp: int = args.tensor_model_parallel_size
        heads = args.num_attention_heads
        groups = args.num_query_groups if args.group_query_attention else heads
        self.head_size = args.kv_channels or self.hidden // heads
        self.query = self.head_size * heads
        self.qkv = self.head_size * (heads + 2 * groups)
        self.gates = 2 if args.swiglu else 1
        # As Megatron's validate_args.
        self.ffn = args.ffn_hidden_size or (int(4 * self.hidden * 2 / 3 / 64) * 64 if args.swiglu else 4 * self.hidden)
        self.expert_tp: int = args.expert_tensor_parallel_size or self.tp
        if args.num_experts is not None and args.num_experts % args.expert_model_parallel_size:
            raise ValueError(
                f"--num-experts {args.num_experts} cannot be spread over "
                f"--expert-model-parallel-size {args.expert_model_parallel_size}"
            )

    def embedding(self) -> Iterator[Param]:
        yield self._split("embedding.word_embeddings.weight", padded_vocabulary(self.args) * self.hidden)
        if self.args.position_embedding_type == "learned_absolute" and self.args.add_position_embedding:
            length = self.args.max_position_embeddings or self.args.seq_length
            yield Param("embedding.position_embeddings.weight", length * self.hidden)

    def head(self, stage: int) -> Iterator[Param]:
        yield from self._norm("decoder.final_layernorm", self.hidden)
        numel = padded_vocabulary(self.args) * self.hidden
        if self.args.untie_embeddings_and_output_weights:
            yield self._split("output_layer.weight", numel)
        elif stage > 0:  # a copy of the embedding, on ranks of its own
            yield self._split("output_layer.copy", numel)

    def layer(self, number: int) -> Iterator[Param]:
        prefix = f"decoder.layers.{number}."
        attention = prefix + "self_attention."
        yield from self._norm(prefix + "input_layernorm", self.hidden)
        yield self._split(attention + "linear_proj.weight", self.query * self.hidden)
        if self.args.add_bias_linear:
            yield Param(attention + "linear_proj.bias", self.hidden, 1)
        yield self._split(attention + "linear_qkv.weight", self.qkv * self.hidden)
        if self.args.add_bias_linear or self.args.add_qkv_bias:
            yield self._split(attention + "linear_qkv.bias", self.qkv, 1)
        if self.args.qk_layernorm:
            yield from self._norm(attention + "q_layernorm", self.head_size)
            yield from self._norm(attention + "k_layernorm", self.head_size)
        yield from self._norm(prefix + "pre_mlp_layernorm", self.hidden)
        if self._has_experts(number):
            yield from self._experts(prefix + "mlp.")
        else:
            yield from self._mlp(prefix + "mlp.", self.ffn)

    def _has_experts(self, number: int) -> bool:
        if self.args.num_experts is None:
            return False
        frequency: int | Sequence[int] = self.args.moe_layer_freq
        return number % frequency == 0 if isinstance(frequency, int) else bool(frequency[number])

    def _mlp(self, prefix: str, width: int) -> Iterator[Param]:
        yield self._split(prefix + "linear_fc1.weight", self.gates * width * self.hidden)
        yield self._split(prefix + "linear_fc2.weight", width * self.hidden)
        if self.args.add_bias_linear:
            yield self._split(prefix + "linear_fc1.bias", self.gates * width, 1)
            yield Param(prefix + "linear_fc2.bias", self.hidden, 1)

    def _experts(self, prefix: str) -> Iterator[Param]:
        args = self.args
        yield Param(prefix + "router.weight", args.num_experts * self.hidden)
        width = args.moe_ffn_hidden_size or self.ffn
        for expert in range(args.num_experts // args.expert_model_parallel_size):
            name = f"{prefix}experts.local_experts.{expert}."
            for part, numel in (("linear_fc1", self.gates * width), ("linear_fc2", width)):
                yield self._split(f"{name}{part}.weight", numel * self.hidden, expert=True)
            if args.add_bias_linear:
                yield self._split(f"{name}linear_fc1.bias", self.gates * width, 1, expert=True)
                ranks = args.expert_model_parallel_size
                yield Param(f"{name}linear_fc2.bias", self.hidden, 1, True, ranks > 1, copies=ranks)
        if args.moe_shared_expert_intermediate_size is not None:
            yield from self._mlp(prefix + "shared_experts.", args.moe_shared_expert_intermediate_size)
            if args.moe_shared_expert_gate:
                yield Param(prefix + "shared_experts.gate_weight", self.hidden)

    def _norm(self, name: str, width: int) -> Iterator[Param]:
        yield Param(name + ".weight", width, 1)
        if self.args.normalization == "LayerNorm":
            yield Param(name + ".bias", width, 1)

    def _split(self, name: str, numel: int, num_dimensions: int = 2, *, expert: bool = False) -> Param:
        ways = self.expert_tp if expert else self.tp
        if numel % ways:
            flag = "--expert-tensor-parallel-size" if expert and self.args.expert_tensor_parallel_size else None
            raise ValueError(f"{name} cannot be split by {flag or '--tensor-model-parallel-size'} {ways}")
        ranks = self.args.expert_model_parallel_size if expert else 1
        return Param(name, numel // ways, num_dimensions, expert, ranks > 1, copies=ways * ranks)
