"""LoCo for models in ``torch.nn.parallel.DistributedDataParallel``: one line, :func:`apply`."""

from megatron_loco.integrations.pytorch.ddp import LoCoState, apply, loco_hook

__all__ = ["LoCoState", "apply", "loco_hook"]
