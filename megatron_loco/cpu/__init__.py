"""Run unmodified Megatron on CPU ranks over Gloo: for tests and for trying things out on a machine without a GPU.

    from megatron_loco import cpu

    with cpu.enter():
        ...  # pretrain_gpt.py, Megatron's own modules

Importing this package patches nothing and imports neither Megatron nor Triton; :func:`enter` does, and
:meth:`Runtime.exit` undoes it. ``torch.cuda.is_available()`` keeps telling the truth. What is changed, one named
function each, and which Megatron call needs it, stands in ``PATCHES`` of :mod:`placement`, :mod:`device`, :mod:`rng`,
:mod:`gloo` and :mod:`megatron`.

What only some releases need is in :func:`megatron.patches_of`. Hybrid models are made of :mod:`hybrid_specs`.

The flags that Megatron needs on CPU are enforced by :func:`check_arguments`, which also runs by itself inside
Megatron's own argument validation while the runtime is active.
"""

from megatron_loco.cpu.arguments import check_arguments
from megatron_loco.cpu.runtime import Runtime, enter

__all__ = ["Runtime", "check_arguments", "enter"]
