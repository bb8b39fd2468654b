"""What differs between Megatron releases for LoCo, apart from the sources of the seams."""

from __future__ import annotations

from typing import Any

from megatron_loco.integrations.megatron.releases import is_older, megatron_version, release_of


def gradient_spans(bucket: Any) -> dict[Any, tuple[int, int]]:
    """Return parameter -> where its gradient starts and stops in ``bucket.grad_data``; the rest is padding."""
    if not _before("0.17"):
        spans: dict[Any, tuple[int, int]] = bucket.param_to_index
        return spans
    # The bucket's own map leaves out the padding between parameters there. Their gradients are views of the bucket.
    begin = bucket.grad_data.storage_offset()
    starts = {param: param.main_grad.storage_offset() - begin for param in bucket.params_list}
    return {param: (start, start + param.numel()) for param, start in starts.items()}


def captures_whole_step(settings: Any) -> bool:
    """Whether a CUDA graph holds a whole step, by Megatron's arguments or its ``TransformerConfig``."""
    # Until 0.17 a scope of the "local" implementation: one, or a list, of names or members of an enumeration.
    scopes = getattr(settings, "cuda_graph_scope", None) or ()
    names = [getattr(scope, "name", scope) for scope in (scopes if isinstance(scopes, list | tuple) else (scopes,))]
    return "full_iteration" in (settings.cuda_graph_impl, *names)


def waits_for_wrong_stream(settings: Any) -> bool:
    """Whether stock's gradients are used before they are reduced (Megatron-LM issue 3670).

    Args:
        settings: A ``DistributedDataParallelConfig``.
    """
    return bool(settings.overlap_grad_reduce and settings.num_distributed_optimizer_instances > 1 and _before("0.17"))


def _before(release: str) -> bool:
    return is_older(release_of(megatron_version()), release)
