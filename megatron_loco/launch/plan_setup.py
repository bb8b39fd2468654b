"""What ``megatron-loco plan`` is asked about: model, layout of ranks and batch, from a configuration or from flags."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_loco.config import LoCoConfig
from megatron_loco.launch import byte_tokens, loco_section, overrides, yaml_file
from megatron_loco.launch.plan_cost import Group
from megatron_loco.launch.plan_model import Model, model_from_args, model_of_size
from megatron_loco.launch.resolve import OwnSections
from megatron_loco.launch.values import Document, Setting


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How ranks are spread, in Megatron's order: tensor parallel ranks are neighbours, then context, data, pipeline.

    ``pipeline_inside_data``: the order of ``--use-tp-pp-dp-mapping``.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    pipeline_inside_data: bool = False

    def data_parallel(self, world_size: int) -> int:
        """Ranks with different data.

        Raises:
            ValueError: the ranks cannot be spread like that.
        """
        for sizes in ((self.tensor, self.context, self.pipeline), (self.expert_tensor, self.expert, self.pipeline)):
            product = sizes[0] * sizes[1] * sizes[2]
            if world_size % product:
                raise ValueError(
                    f"--nodes x --gpus-per-node = {world_size} GPUs cannot be divided by the model-parallel sizes "
                    f"{' x '.join(map(str, sizes))} = {product}; change --nodes or the parallel layout"
                )
        if (
            self.pipeline_inside_data
            and self.pipeline > 1
            and self.tensor * self.context != self.expert_tensor * self.expert
        ):
            raise ValueError(
                "--use-tp-pp-dp-mapping: with pipeline stages Megatron wants TP x CP equal to the experts' TP x EP; "
                "leave the flag out"
            )
        return world_size // (self.tensor * self.context * self.pipeline)

    def group_ranks(self, world_size: int, stage: int, *, expert: bool = False) -> list[int]:
        """Global ranks of one group of pipeline stage ``stage`` that reduces gradients together."""
        stride = self.expert_tensor * self.expert if expert else self.tensor
        inner = 1 if expert else self.context
        size = world_size // (stride * self.pipeline)
        if self.pipeline_inside_data:
            block = stride * inner * self.pipeline
            return [k // inner * block + stage * stride * inner + k % inner * stride for k in range(size)]
        return [stage * (world_size // self.pipeline) + k * stride for k in range(size)]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything about the run; the cluster is separate.

    Attributes:
        tokens_per_gpu: Of one step: tokens of the global batch over GPUs.
        num_micro_batches: Per step and data-parallel rank.
        bubble: Idle share of the pipeline relative to its work.
        grad_bytes: Bytes of an element of Megatron's gradient buffers: 4, or 2 with --grad-reduce-in-bf16.
    """

    name: str
    model: Model
    loco: LoCoConfig
    layout: Layout
    tokens_per_gpu: float
    num_micro_batches: int
    bubble: float = 0.0
    grad_bytes: int = 4
    overlap_reduce: bool = False
    overlap_gather: bool = False
    notes: tuple[str, ...] = ()

    def groups(self, world_size: int, gpus_per_node: int) -> list[Group]:
        """Groups that a rank of the largest pipeline stage is in: one, or a second one for experts."""
        stage = self.model.largest_stage
        params = self.model.stages[stage]
        found = []
        for name, expert in (("dense", False), ("experts", True)):
            own = tuple(param for param in params if param.own_group == expert)
            if own:
                ranks = self.layout.group_ranks(world_size, stage, expert=expert)
                hosts = [rank // gpus_per_node for rank in ranks]
                numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
                found.append(Group(name, own, tuple(numbers[host] for host in hosts)))
        return found


def from_size(options: argparse.Namespace, words: Sequence[str], world_size: int) -> Setup:
    """Read ``--params N --tokens-per-gpu N``.

    Raises:
        ValueError: a flag is missing or a word is not ``loco.KEY=VALUE``.
    """
    if options.tokens_per_gpu is None:
        raise ValueError("--params needs --tokens-per-gpu N: the tokens of a global batch over the number of GPUs")
    for name in ("params", "tokens_per_gpu", "tp", "pp", "micro_batches"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    document = overrides.apply({"loco": {"bits": Setting(4, "plan")}}, words)
    others = [section for section in document if section != "loco"]
    if others:
        raise ValueError(
            f"--params: only loco.KEY=VALUE can be set, got {', '.join(words)}; --tp and --pp set the layout"
        )
    tensor, pipeline = options.tp or 1, options.pp or 1
    layout = Layout(tensor=tensor, pipeline=pipeline, expert_tensor=tensor)
    layout.data_parallel(world_size)
    micro_batches = options.micro_batches or 1
    loco, notes = _settings(loco_section.from_section(document["loco"]))
    return Setup(
        name=f"{options.params:.4g} parameters",
        model=model_of_size(int(options.params), tensor=tensor, pipeline=pipeline),
        loco=loco,
        layout=layout,
        tokens_per_gpu=options.tokens_per_gpu,
        num_micro_batches=micro_batches,
        bubble=(pipeline - 1) / micro_batches,
        grad_bytes=2 if options.grad_reduce_in_bf16 else 4,
        overlap_reduce=options.overlap_grad_reduce,
        overlap_gather=options.overlap_param_gather,
        notes=notes,
    )


def load(config_file: str, words: Sequence[str]) -> tuple[Document, OwnSections]:
    """Read a configuration and check the sections that are not Megatron's.

    Raises:
        ValueError: as the launcher.
    """
    document = overrides.apply(yaml_file.load(config_file), words)
    return document, OwnSections.read(document, config_file=config_file)


def from_document(document: Document, own: OwnSections, world_size: int) -> Setup:
    """Read a configuration as the launcher does, Megatron's flags included (imports Megatron).

    Raises:
        ValueError: a key is wrong, LoCo refuses the combination, the batch or the ranks do not divide, or the model is
            not one whose parameters are counted.
    """
    from megatron_loco.integrations.megatron.arguments import check_combinations

    args = _parse(document, own)
    loco, notes = _settings(own.loco)
    for name, value in dataclasses.asdict(loco).items():
        setattr(args, f"loco_{name}", value)
    check_combinations(args)
    if args.num_distributed_optimizer_instances > 1:
        raise ValueError("--num-distributed-optimizer-instances: plan knows one instance only; set it to 1")
    layout = Layout(
        tensor=args.tensor_model_parallel_size,
        context=args.context_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        expert=args.expert_model_parallel_size,
        expert_tensor=args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
        pipeline_inside_data=args.use_tp_pp_dp_mapping,
    )
    data_parallel = layout.data_parallel(world_size)
    for name in ("micro_batch_size", "seq_length"):
        if getattr(args, name) is None:
            raise ValueError(f"--{name.replace('_', '-')} is missing; plan needs it to know the tokens of a step")
    at_once = args.micro_batch_size * data_parallel
    batch = args.global_batch_size or at_once
    if batch % at_once:
        raise ValueError(
            f"--global-batch-size {batch} cannot be divided by --micro-batch-size {args.micro_batch_size} x "
            f"{data_parallel} data-parallel ranks"
        )
    model = model_from_args(args)
    num_micro_batches = batch // at_once
    return Setup(
        name=own.run.name,
        model=model,
        loco=loco,
        layout=layout,
        tokens_per_gpu=batch * args.seq_length / world_size,
        num_micro_batches=num_micro_batches,
        bubble=(layout.pipeline - 1) / (num_micro_batches * _virtual_stages(args)),
        grad_bytes=2 if args.grad_reduce_in_bf16 or own.run.baseline == "bf16" else 4,
        overlap_reduce=args.overlap_grad_reduce,
        overlap_gather=args.overlap_param_gather,
        notes=notes,
    )


def _settings(loco: LoCoConfig | None) -> tuple[LoCoConfig, tuple[str, ...]]:
    if loco is not None:
        return loco, ()
    return LoCoConfig(bits=4), ("LoCo is off in the configuration; planned with 4 bits and the defaults",)


def _virtual_stages(args: Any) -> int:
    if args.num_virtual_stages_per_pipeline_rank:
        return int(args.num_virtual_stages_per_pipeline_rank)
    if args.num_layers_per_virtual_pipeline_stage:
        per_stage: int = args.num_layers // args.pipeline_model_parallel_size
        return max(1, per_stage // int(args.num_layers_per_virtual_pipeline_stage))
    return 1


def _parse(document: Document, own: OwnSections) -> Any:
    from megatron_loco.launch.megatron_flags import MegatronFlags, quiet

    with quiet():
        from megatron.training.arguments import add_megatron_arguments

        parser = argparse.ArgumentParser(allow_abbrev=False)
        add_megatron_arguments(parser)
    args = parser.parse_args(MegatronFlags(parser).argv(document))
    if own.run.corpus is not None and args.vocab_size is None:
        args.vocab_size = byte_tokens.VOCAB_SIZE
    return args
