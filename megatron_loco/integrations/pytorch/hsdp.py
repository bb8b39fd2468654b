"""Hybrid sharding without torch's all-reduce between replicas, which then is left to the all-reduce hook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MeshInfos:
    """What an FSDP2 parameter group knew of its mesh."""

    mesh_info: Any
    post_forward_mesh_info: Any

    def restore(self, param_group: Any) -> None:
        """Put it back."""
        param_group.mesh_info = self.mesh_info
        param_group.post_forward_mesh_info = self.post_forward_mesh_info


def shard_only(param_group: Any) -> MeshInfos:
    """Let a parameter group of a two-dimensional mesh reduce over its shard dimension only.

    torch has no interface for it: its hook comes after its own all-reduce. Parameters keep their own description of the
    mesh, so that their placements, and checkpoints, stay those of hybrid sharding.

    Args:
        param_group: ``FSDPParamGroup`` of a hybrid mesh; changed.

    Returns:
        What it was, to put back.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    before = MeshInfos(param_group.mesh_info, param_group.post_forward_mesh_info)
    hybrid = param_group.mesh_info
    # A shallow copy with the class that has no replicas: the constructor would make groups anew.
    alone = object.__new__(FSDPMeshInfo)
    alone.__dict__.update(hybrid.__dict__)
    param_group.mesh_info = alone
    if before.post_forward_mesh_info is hybrid:
        # The same object says "gather again over the same ranks".
        param_group.post_forward_mesh_info = alone
    return before
