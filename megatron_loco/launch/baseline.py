"""``run.baseline``: one switch for the run that LoCo is compared with."""

from __future__ import annotations

from megatron_loco.launch.overrides import COMMAND_LINE
from megatron_loco.launch.run_config import RunConfig
from megatron_loco.launch.sections import MEGATRON_SECTIONS
from megatron_loco.launch.values import Document, Setting, located

_FLAG = "grad-reduce-in-bf16"
_OFF = "off"


def switch_loco_off(document: Document, run: RunConfig) -> Document:
    """Return the document with what ``run.baseline`` means: ``loco.bits: off``.

    Args:
        document: The file with its overrides.
        run: Its ``run`` section.

    Returns:
        The document itself where there is no baseline.

    Raises:
        ValueError: ``loco.bits`` says something else, and not in a file that the command line overrules.
    """
    if run.baseline is None:
        return document
    switch = document["run"]["baseline"]
    bits = document.get("loco", {}).get("bits")
    if bits is not None and bits.value not in (None, _OFF) and not _overrules(switch, bits):
        raise located(
            bits.where,
            "loco.bits",
            f"run.baseline is {run.baseline} ({switch.where}), which is a run without LoCo; set one of the two "
            "(run.baseline=null)",
        )
    return {**document, "loco": {**document.get("loco", {}), "bits": Setting(_OFF, switch.where)}}


def add_gradient_type(document: Document, megatron: Document, run: RunConfig) -> None:
    """Set ``grad-reduce-in-bf16`` in the Megatron sections as ``run.baseline`` says.

    Args:
        document: The file with its overrides.
        megatron: Its Megatron sections, which are changed.
        run: Its ``run`` section.

    Raises:
        ValueError: the flag is set otherwise, and not in a file that the command line overrules, or other flags decide
            the type of gradients.
    """
    if run.baseline is None:
        return
    switch = document["run"]["baseline"]
    flags = {key: (name, s) for name in MEGATRON_SECTIONS for key, s in megatron.get(name, {}).items()}

    def refuse(key: str, why: str) -> ValueError:
        section, setting = flags[key]
        return located(setting.where, f"{section}.{key}", f"run.baseline is {run.baseline}, but {why}")

    for key in ("fp16", "accumulate-allreduce-grads-in-fp32") if run.baseline == "bf16" else ("fp16",):
        if key in flags and flags[key][1].value is True:
            raise refuse(key, "then gradients are not reduced in it; leave the flag out")
    if "main-grads-dtype" in flags and flags["main-grads-dtype"][1].value not in (None, run.baseline):
        raise refuse("main-grads-dtype", "this keeps them in another type; leave the flag out")
    if run.baseline == "bf16" and ("bf16" not in flags or flags["bf16"][1].value is not True):
        problem = "gradients of fp32 parameters are reduced in fp32; add precision.bf16=true, or use fp32"
        raise located(switch.where, "run.baseline", problem)
    wanted = run.baseline == "bf16"
    section, setting = flags.get(_FLAG, ("precision", Setting(None, "")))
    if setting.value not in (None, wanted) and not _overrules(switch, setting):
        raise refuse(_FLAG, "this says otherwise; leave the flag out")
    megatron.setdefault(section, {})[_FLAG] = Setting(wanted, switch.where)


def _overrules(switch: Setting, other: Setting) -> bool:
    return switch.where == COMMAND_LINE and other.where != COMMAND_LINE
