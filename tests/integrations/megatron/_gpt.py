"""A tiny GPT under Megatron's own pipeline schedules, distributed optimizer and gradient finalisation, without its
command line: what no prescribed gradient can show (tied embeddings, experts, frozen stages), many cases per process."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loco import cpu
from megatron_loco.bench.prescribed import end_new_groups
from megatron_loco.config import LoCoConfig

VOCABULARY, LENGTH, HIDDEN = 96, 16, 32


@dataclass(frozen=True)
class Gpt:
    """Model and parallelism."""

    pipeline: int = 1
    virtual_pipeline: int | None = None
    expert_parallel: int = 1
    num_instances: int = 1
    num_layers: int = 2
    num_experts: int | None = None
    moe_layers: tuple[int, ...] = ()
    """1 for a layer with experts, 0 for one without; default: experts everywhere."""
    tied: bool = False
    overlap: bool = False
    average: bool = False
    dtype: torch.dtype = torch.bfloat16
    num_micro_batches: int = 2
    grad_norm_skip_threshold: float = math.inf


class Training:
    """A model, its optimizer and steps; made by :func:`training`."""

    def __init__(self, gpt: Gpt, is_frozen: Callable[[str], bool]) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        self.gpt = gpt
        self.config = _transformer_config(gpt)
        self.chunks: list[Any] = []
        self.models: list[Any] = []
        for stage in range(gpt.virtual_pipeline or 1):
            model = _model(gpt, self.config, stage if gpt.virtual_pipeline else None)
            _initialise(model)
            for name, param in _globally_named(model):
                param.requires_grad_(not is_frozen(name))
            ddp_config = DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=gpt.overlap,
                average_in_collective=gpt.average,
                num_distributed_optimizer_instances=gpt.num_instances,
            )
            self.models.append(model)
            if gpt.dtype != torch.float32:
                model = Float16Module(self.config, model)
            self.chunks.append(DistributedDataParallel(self.config, ddp_config, model, disable_bucketing=stage > 0))
        self._connect()
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                weight_decay=0.0,
                bf16=gpt.dtype == torch.bfloat16,
                use_distributed_optimizer=True,
                overlap_param_gather=False,
                clip_grad=1.0,
                grad_norm_skip_threshold=gpt.grad_norm_skip_threshold,
            ),
            self.chunks,
        )

    def _connect(self) -> None:
        # As megatron.training does before its first step.
        from megatron.core.distributed import finalize_model_grads

        def one_or_all(functions: list[Any]) -> Any:
            return functions[0] if len(functions) == 1 else functions

        self.config.finalize_model_grads_func = finalize_model_grads
        if self.gpt.overlap:
            self.config.no_sync_func = one_or_all([chunk.no_sync for chunk in self.chunks])
            if self.gpt.virtual_pipeline:
                self.config.grad_sync_func = [chunk.start_grad_sync for chunk in self.chunks]

    def backward(self, step: int) -> None:
        """Forward, backward and gradient reduction of one global batch."""
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        data_rank = parallel_state.get_data_parallel_rank()
        batches = [_batches(data_rank, step, self.gpt.num_micro_batches) for _ in self.chunks]
        get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=batches if len(batches) > 1 else batches[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=self.gpt.num_micro_batches,
            seq_length=LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )

    def step(self, step: int) -> None:
        """One training step."""
        self.backward(step)
        # A stage without trainable parameters has an optimizer that does nothing.
        assert self.optimizer.step()[0] or self.optimizer.is_stub_optimizer

    def parameters(self) -> dict[str, Tensor]:
        """Copies of this rank's parameters, by :func:`_globally_named`."""
        return {name: param.detach().clone() for name, param in self._named()}

    def gradients(self) -> dict[str, Tensor]:
        """Reduced gradients of this rank's parameters, gathered from their owners; undoes nothing, but fills the
        gradient buffers."""
        for chunk in self.chunks:
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                ranks = group.intra_distributed_optimizer_instance_group
                for bucket in group.buckets:
                    shard = bucket.grad_data.view(ranks.size(), -1)[ranks.rank()].clone()
                    dist.all_gather_into_tensor(bucket.grad_data, shard, group=ranks)
        return {name: param.main_grad.clone() for name, param in self._named() if param.requires_grad}

    def _named(self) -> Iterator[tuple[str, Any]]:
        for model in self.models:
            yield from _globally_named(model)


@contextmanager
def megatron(gpt: Gpt) -> Iterator[None]:
    """Enter the CPU runtime and set up the groups of ``gpt`` on the ranks of the default group."""
    with ExitStack() as stack:
        stack.enter_context(cpu.enter())
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator

        end_new_groups(stack)
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=gpt.pipeline,
            virtual_pipeline_model_parallel_size=gpt.virtual_pipeline,
            expert_model_parallel_size=gpt.expert_parallel,
            num_distributed_optimizer_instances=gpt.num_instances,
        )
        stack.callback(parallel_state.destroy_model_parallel)
        stack.callback(destroy_num_microbatches_calculator)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        yield


@contextmanager
def training(
    gpt: Gpt, loco: LoCoConfig | None, is_frozen: Callable[[str], bool] = lambda name: False
) -> Iterator[Training]:
    """A fresh model with LoCo (``loco``) or on stock Megatron (``None``); needs :func:`megatron`.

    Args:
        gpt: Model and parallelism.
        loco: Settings.
        is_frozen: Says which parameters get no gradient, by :func:`_globally_named`.
    """
    from megatron_loco import patch

    with patch(loco) if loco else nullcontext():
        yield Training(gpt, is_frozen)


def _transformer_config(gpt: Gpt) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=gpt.num_layers,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=48,
        moe_ffn_hidden_size=48 if gpt.num_experts else None,
        bf16=gpt.dtype == torch.bfloat16,
        params_dtype=gpt.dtype,
        pipeline_dtype=gpt.dtype,
        pipeline_model_parallel_size=gpt.pipeline,
        virtual_pipeline_model_parallel_size=gpt.virtual_pipeline,
        expert_model_parallel_size=gpt.expert_parallel,
        num_moe_experts=gpt.num_experts,
        moe_layer_freq=list(gpt.moe_layers) or 1,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        overlap_p2p_comm=False,
        batch_p2p_comm=True,
    )


def _model(gpt: Gpt, config: Any, virtual_stage: int | None) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

    last = {"ignore_virtual": False, "vp_stage": virtual_stage}
    spec = (
        get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=virtual_stage)
        if gpt.num_experts
        else get_gpt_layer_local_spec(normalization="RMSNorm")
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(**last),
        post_process=parallel_state.is_pipeline_last_stage(**last),
        share_embeddings_and_output_weights=gpt.tied,
        position_embedding_type="rope",
        vp_stage=virtual_stage,
    )


def _globally_named(model: Any) -> Iterator[tuple[str, Any]]:
    # Layers and experts by their number in the whole model.
    from megatron.core import parallel_state

    for name, param in model.named_parameters():
        parts = name.split(".")
        if "layers" in parts:
            layer = model.decoder.layers[int(parts[parts.index("layers") + 1])]
            parts[parts.index("layers") + 1] = str(layer.layer_number - 1)
            if "local_experts" in parts:
                at = parts.index("local_experts") + 1
                first = parallel_state.get_expert_model_parallel_rank() * layer.mlp.num_local_experts
                parts[at] = str(first + int(parts[at]))
        yield ".".join(parts), param


def _initialise(model: Any) -> None:
    # By global name, so that every way to split the model starts from the same weights.
    for name, param in _globally_named(model):
        same = "embedding.word_embeddings.weight" if name == "output_layer.weight" else name
        generator = torch.Generator().manual_seed(zlib.crc32(same.encode()))
        values = torch.randn(param.shape, generator=generator) * 0.1
        with torch.no_grad():
            param.copy_(1 + values if param.dim() < 2 else values)


def _batches(data_rank: int, step: int, num: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    for _ in range(num):
        yield torch.randint(VOCABULARY, (1, LENGTH + 1), generator=generator)


def _forward_step(batches: Iterator[Tensor], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    tokens = next(batches)
    positions = torch.arange(LENGTH)[None]
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), diagonal=1)
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    return output, _loss


def _loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach()}
