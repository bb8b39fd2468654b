"""What Megatron multiplies the gradients of a step by: the loss scale and, with per-token loss, the number of tokens.

The stored error is added to the gradients of a later step, and must be in their unit then
(:meth:`megatron_loco.collectives.state.BucketState.begin_step` converts it). Megatron gives:

* The loss scale: ``config.grad_scale_func`` of the model's ``TransformerConfig``, which the training loop sets to the
  optimizer's ``scale_loss``. It multiplies the loss, so all gradients, those of experts too.
* With ``--calculate-per-token-loss`` gradients are sums over tokens: ``finalize_model_grads`` reduces them, then counts
  the tokens of the global batch, then divides by at least 1. LoCo needs the count before the reduction, so it is taken
  earlier, in the same way. With ``--overlap-grad-reduce`` the reduction starts before the last tokens are counted, and
  the combination is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loco.config import LoCoConfig


class GradientUnit:
    """The unit of the gradients that are being reduced."""

    def __init__(self) -> None:
        self._num_tokens: Tensor | None = None

    def check_known(self, model_config: Any, config: LoCoConfig) -> None:
        """Check that :meth:`of` can answer; outside of torch's coalescing manager, which an exception would break.

        Raises:
            RuntimeError: it cannot.
        """
        if not config.depends_on_unit:
            return
        if model_config.fp16 and model_config.grad_scale_func is None:
            raise RuntimeError(
                "LoCo: the loss scale of this fp16 model is not known; set grad_scale_func of its TransformerConfig to "
                "the optimizer's scale_loss before the first step, as Megatron's train() does"
            )
        if model_config.calculate_per_token_loss and self._num_tokens is None:
            raise RuntimeError(
                "LoCo: gradients of a model with calculate_per_token_loss are being reduced outside of "
                "finalize_model_grads(model, num_tokens), which counts their tokens; reduce them there, and call "
                "megatron_loco.patch() before finalize_model_grads is imported by name"
            )

    def of(self, model_config: Any, config: LoCoConfig, device: torch.device) -> Tensor | None:
        """Return what the gradients of a model are multiplied by now, without waiting for the device.

        Args:
            model_config: Its ``TransformerConfig``.
            config: Settings of LoCo.
            device: Where the gradients are.

        Returns:
            fp32, shape ``[]``; ``None`` where LoCo keeps nothing that depends on it.
        """
        if not config.depends_on_unit:
            return None
        unit = torch.ones((), dtype=torch.float32, device=device)
        if model_config.grad_scale_func is not None:
            unit = model_config.grad_scale_func(unit).to(torch.float32).reshape(())
        return unit if self._num_tokens is None else unit * self._num_tokens

    def wrap_finalize_model_grads(
        self, active: Callable[[], LoCoConfig | None], stock: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return the replacement of ``megatron.core.distributed.finalize_model_grads``.

        Args:
            active: Returns the settings, or ``None`` where LoCo is off; equal on all ranks.
            stock: The original.
        """

        def finalize_model_grads(
            model: list[Any],
            num_tokens: Tensor | None = None,
            pg_collection: Any = None,
            force_all_reduce: bool | None = False,
        ) -> Any:
            config = active()
            if num_tokens is not None and config is not None and config.depends_on_unit:
                self._num_tokens = _global_tokens(num_tokens, pg_collection)
            try:
                return stock(model, num_tokens, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
            finally:
                self._num_tokens = None

        return finalize_model_grads


def refusal(ddp: Any, config: LoCoConfig) -> str | None:
    """Why the unit of a model's gradients cannot be known in time, or ``None``."""
    if ddp.config.calculate_per_token_loss and ddp.ddp_config.overlap_grad_reduce and config.depends_on_unit:
        return (
            "LoCo needs the number of tokens before the gradients are reduced: with calculate_per_token_loss leave "
            "overlap_grad_reduce off (or keep no error: --loco-error-bits 0)"
        )
    return None


def _global_tokens(num_tokens: Tensor, pg_collection: Any) -> Tensor:
    # The divisor that finalize_model_grads computes after the reduction, by the same collectives; its own comes out the
    # same, since it starts from a tensor that is left alone.
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.utils import get_pp_last_rank

    if pg_collection is not None:
        pp_group = pg_collection.pp
        dp_cp_group = getattr(pg_collection, "dp_cp_gtp_remat", None) or pg_collection.dp_cp
    else:
        pp_group = parallel_state.get_pipeline_model_parallel_group()
        dp_cp_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    count = num_tokens.clone()
    dist.broadcast(count, src=get_pp_last_rank(pp_group), group=pp_group)
    dist.all_reduce(count, group=dp_cp_group)
    return count.clamp(min=1).to(torch.float32).reshape(())
