"""What :mod:`megatron_loco.launch.pretrain_gpt` calls and what is not the same in every supported release of Megatron.

- 0.17 parses the command line inside ``pretrain``; 0.18 wants it parsed before, and a container of configurations.
- Until 0.18 the script brings the function that builds the model; since 0.19 Megatron builds it from a configuration.
- In 0.17 ``get_batch_on_this_tp_rank`` draws from the loader itself and lies elsewhere; 0.18 and 0.19 name its switch
  for packed sequences differently.
- 0.17 asks for multi-token prediction with the model's configuration, later ones with two of its fields.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import megatron.core
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from torch import Tensor

RELEASE = tuple(int(part) for part in megatron.core.__version__.split(".")[:2])
"""Of the Megatron that is imported, which need not be the installed one."""

_DEFAULTS = {"tokenizer_type": "NullTokenizer"}

_NOT_BUILT = ("spec", "heterogeneous_layers_config_path", "experimental_attention_variant", "use_legacy_models")


def run(
    check: Callable[[Namespace], None],
    datasets: Callable[..., Any],
    forward_step: Callable[..., Any],
    embedding_ranks: Callable[[list[int]], list[int]],
) -> None:
    """Parse Megatron's command line and train.

    Args:
        check: Called with the parsed arguments before anything is allocated; raises for those that are refused.
        datasets: Builds the training, validation and test datasets.
        forward_step: One forward pass.
        embedding_ranks: Ranks of a pipeline that hold an embedding.
    """
    if RELEASE < (0, 18):
        from megatron.training.arguments import parse_args

        check(parse_args())
        pretrain(
            datasets,
            build_gpt,
            ModelType.encoder_or_decoder,
            forward_step,
            args_defaults=_DEFAULTS,
            get_embedding_ranks=embedding_ranks,
        )
        return
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(args_defaults=_DEFAULTS)
    check(args)
    if RELEASE < (0, 19):
        model, builder = None, [build_gpt]
    else:
        from megatron.training.argument_utils import gpt_config_from_args

        model, builder = gpt_config_from_args(args), []
    pretrain(
        pretrain_cfg_container_from_args(args, model),
        datasets,
        *builder,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=embedding_ranks,
    )


def not_built(args: Namespace) -> list[str]:
    """Name the arguments that :func:`build_gpt` does not handle, where this release needs it."""
    return [name for name in _NOT_BUILT if getattr(args, name, None)] if RELEASE < (0, 19) else []


def build_gpt(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """Build the part of the GPT model that this pipeline stage holds: dense, or with experts, or both by turns.

    Args:
        pre_process: The stage has the input embedding.
        post_process: The stage has the output layer.
        vp_stage: Model chunk of the stage under interleaving.
        config: Configuration of the layers; that of the command line by default.
        pg_collection: Process groups; those of ``parallel_state`` by default.

    Returns:
        A ``GPTModel``.
    """
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    args = get_args()
    config = config or core_transformer_config_from_args(args)
    engine = args.transformer_impl == "transformer_engine"
    style = {"normalization": args.normalization, "qk_l2_norm": args.qk_l2_norm}
    mtp_spec = None
    if args.mtp_num_layers is not None:
        layers = gpt_layer_specs.get_gpt_decoder_layer_specs(config, engine, **style)
        mtp_spec = gpt_layer_specs.get_gpt_mtp_block_spec(config, layers[-1], engine, vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=gpt_layer_specs.get_gpt_decoder_block_spec(config, engine, **style, vp_stage=vp_stage),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        mtp_block_spec=mtp_spec,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


def predicts_several_tokens(vp_stage: int | None) -> bool:
    """Whether layers of multi-token prediction are on this pipeline stage."""
    config = core_transformer_config_from_args(get_args())
    if RELEASE < (0, 18):
        return bool(mtp_on_this_rank(config, ignore_virtual=False, vp_stage=vp_stage))
    return bool(
        mtp_on_this_rank(
            layout=config.pipeline_model_parallel_layout,
            mtp_num_layers=config.mtp_num_layers,
            ignore_virtual=False,
            vp_stage=vp_stage,
        )
    )


def next_batch(data_iterator: Iterator[dict[str, Tensor]], predicts_several: bool) -> dict[str, Tensor]:
    """Take the next micro-batch from the loader of tensor parallel rank 0 and share what this stage needs of it.

    Args:
        data_iterator: Used on tensor parallel rank 0 only.
        predicts_several: See :func:`predicts_several_tokens`.

    Returns:
        ``tokens``, ``labels``, ``loss_mask``, ``attention_mask``, ``position_ids``, or some of them.
    """
    if RELEASE < (0, 18):
        from megatron.training.utils import get_batch_on_this_tp_rank as share_batch

        shared: dict[str, Tensor] = share_batch(data_iterator, mtp_on_this_rank=predicts_several)
        return shared
    from megatron.core.utils import get_batch_on_this_tp_rank

    args = get_args()
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: dict[str, Tensor | None] = {}
    if tp_rank == 0:
        loaded = next(data_iterator)
        for key in ("tokens", "labels", "loss_mask", "attention_mask", "position_ids"):
            batch[key] = loaded[key].cuda(non_blocking=True) if key in loaded else None
    packed = {"is_sft": False} if RELEASE < (0, 19) else {"has_cu_seqlens": False}
    result: dict[str, Tensor] = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        **packed,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=1,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=predicts_several,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return result
