"""LoCo for models under ``torch.distributed.fsdp.fully_shard``: one line, :func:`apply`."""

from megatron_loco.integrations.pytorch.fsdp2 import FSDP2Handle, apply

__all__ = ["FSDP2Handle", "apply"]
