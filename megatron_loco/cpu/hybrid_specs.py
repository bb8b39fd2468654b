"""A hybrid stack of PyTorch's own layers, for ``pretrain_hybrid.py`` on CPU ranks (Megatron 0.18 and newer):

    --hybrid-layer-pattern '*-*-' --spec megatron_loco.cpu.hybrid_specs hybrid_stack_local_spec

Megatron's own ``hybrid_stack_spec`` is made of Transformer Engine's layers. Here are attention (``*``), MLP (``-``) and
experts (``E``), the halves of the layers that ``GPTModel`` has with ``--transformer-impl local``; ``*-`` is one such
layer. State-space layers need kernels for GPUs. Importing this module imports Megatron.
"""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

# The norm of "RMSNorm" is torch's, of the kind that --normalization says; Apex's fused one is not on a CPU. The number
# of experts, too, is that of the command line: here it only says that there are some.
_dense = get_gpt_layer_local_submodules(normalization="RMSNorm")
_sparse = get_gpt_layer_local_submodules(num_experts=2, moe_grouped_gemm=False, normalization="RMSNorm")

hybrid_stack_local_spec = ModuleSpec(
    module=HybridStack,
    submodules=HybridStackSubmodules(
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=_dense.input_layernorm,
                self_attention=_dense.self_attention,
                self_attn_bda=_dense.self_attn_bda,
            ),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=_dense.pre_mlp_layernorm, mlp=_dense.mlp, mlp_bda=_dense.mlp_bda
            ),
        ),
        moe_layer=ModuleSpec(
            module=MoETransformerLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=_sparse.pre_mlp_layernorm, mlp=_sparse.mlp, mlp_bda=_sparse.mlp_bda
            ),
        ),
    ),
)
