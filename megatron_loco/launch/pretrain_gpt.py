"""GPT pretraining on ``megatron.training`` alone, for runs without a Megatron-LM checkout.

Covers what Megatron-LM's own ``pretrain_gpt.py`` does for plain pretraining: indexed, blended and mock datasets, tied
and untied embeddings, every parallel layout. Knowledge distillation, SFT packing, FIM and ModelOpt need the checkout's
script (``MEGATRON_LM_DIR``); their flags are refused here.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from torch import Tensor

from megatron_loco.launch import post_training
from megatron_loco.launch import pretrain_releases as releases
from megatron_loco.launch.chat_dataset import ChatDataset

_NEEDS_CHECKOUT = (
    "sft",
    "fim_data",
    "dataloader_inter_document_masking",
    "hybrid_context_parallel",
    "logits_load_dir",
    "per_dataset_sequences_path",
)


def main() -> None:
    """Train as Megatron's command line says."""
    train_valid_test_datasets.is_distributed = True  # type: ignore[attr-defined]
    with post_training.enter():
        releases.run(refuse, train_valid_test_datasets, forward_step, embedding_ranks)


def refuse(args: Namespace) -> None:
    """Raise ValueError if ``args`` ask for what only the script of a Megatron-LM checkout does."""
    names = [name for name in _NEEDS_CHECKOUT if getattr(args, name, None)] + releases.not_built(args)
    refused = [f"--{name.replace('_', '-')}" for name in names]
    if args.context_parallel_size > 1:
        refused.append("--context-parallel-size > 1")
    if refused:
        raise ValueError(
            f"{', '.join(refused)}: set MEGATRON_LM_DIR to a Megatron-LM checkout, whose own pretrain_gpt.py handles it"
        )
    if getattr(args, "hybrid_layer_pattern", None):
        raise ValueError(
            "--hybrid-layer-pattern: set MEGATRON_LM_DIR to a Megatron-LM checkout and run.script to pretrain_hybrid.py"
        )


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    """Run the model on the next micro-batch; return its output and the loss function on it."""
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    several = releases.predicts_several_tokens(vp_stage)
    needed = several or is_first_or_last_pipeline_stage(vp_stage)
    batch = releases.next_batch(data_iterator, several) if needed else {}
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        loss_mask=batch.get("loss_mask"),
    )
    return output, partial(loss, batch.get("loss_mask"))


def loss(loss_mask: Tensor | None, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum the token losses that the mask keeps.

    Args:
        loss_mask: 1 for tokens that count, shape ``[batch, seq]``; the last pipeline stage, which calls this, has one.
        output: Token losses, shape ``[batch, seq]``.

    Returns:
        ``(loss sum, number of tokens, {"lm loss": both, for the log})``.
    """
    assert loss_mask is not None
    mask = loss_mask.view(-1).float()
    total = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        # Before the reduction, where the rank at fault is still known.
        for rejected, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=total,
                rejection_func=rejected,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    return total, num_tokens, {"lm loss": torch.cat([total.detach().view(1), num_tokens.view(1)])}


def train_valid_test_datasets(num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Build the training, validation and test datasets of ``num_samples`` samples each."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    # Most settings of the dataset have a flag of the same name; these do not.
    renamed = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "path_to_cache": args.data_cache_path,
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
        "tokenizer": build_tokenizer(args),
    }
    same = {f.name: getattr(args, f.name) for f in dataclasses.fields(GPTDatasetConfig) if hasattr(args, f.name)}
    config = GPTDatasetConfig(**{**same, **renamed})
    text = MockGPTDataset if args.mock_data else GPTDataset
    dataset = ChatDataset if args.data_format == "chat" else text
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    return BlendedMegatronDatasetBuilder(dataset, num_samples, partial(_reads_data, vp_stage), config).build()


def embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Return the pipeline ranks that hold an embedding, out of all ranks of the pipeline group."""
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        args = get_args()
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        ranks.update(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)


def _reads_data(vp_stage: int | None) -> bool:
    if mpu.get_tensor_model_parallel_rank() != 0:
        return False
    return bool(is_first_or_last_pipeline_stage(vp_stage)) or releases.predicts_several_tokens(vp_stage)
