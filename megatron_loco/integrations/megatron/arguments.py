"""The ``--loco-*`` flags on Megatron's own command line, and the combinations that LoCo does not handle."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from megatron_loco.config import OFF, LoCoConfig, fields, flag
from megatron_loco.integrations.megatron.differences import captures_whole_step

_OPTIMIZERS = ("adam", "sgd")

_UNSUPPORTED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "--use-distributed-optimizer",
        # Megatron's validation turns it off for layer-wise optimizers; their own row says so.
        lambda a: not a.use_distributed_optimizer and a.optimizer in _OPTIMIZERS,
        "LoCo compresses the distributed optimizer's reduce-scatter; add --use-distributed-optimizer",
    ),
    (
        "--use-megatron-fsdp",
        lambda a: a.use_megatron_fsdp,
        "it reduces gradients in buffers of its own, which LoCo does not reach; remove the flag and use "
        "--use-distributed-optimizer",
    ),
    (
        "--use-torch-fsdp2",
        lambda a: a.use_torch_fsdp2,
        "it reduces gradients inside PyTorch, which LoCo does not reach; remove the flag and use "
        "--use-distributed-optimizer",
    ),
    (
        "--ddp-reduce-scatter-with-fp32-accumulation",
        lambda a: a.ddp_reduce_scatter_with_fp32_accumulation,
        "LoCo always sums in fp32; remove the flag",
    ),
    (
        "--calculate-per-token-loss",
        lambda a: a.calculate_per_token_loss and a.overlap_grad_reduce and _config(a).depends_on_unit,
        "gradients are sums over tokens, and with --overlap-grad-reduce their reduction starts before the tokens are "
        "counted, so that LoCo cannot keep its error per token; remove --overlap-grad-reduce",
    ),
    (
        "--optimizer",
        lambda a: a.optimizer not in _OPTIMIZERS,
        "Megatron runs it layer by layer and turns its distributed optimizer off; LoCo is verified with adam and sgd",
    ),
    (
        "--rerun-mode",
        lambda a: a.rerun_mode == "report_stats" and _config(a).keeps_error and a.loco_rollback != "restore",
        "it repeats every step, and --loco-rollback zero would start the error anew each time; add --loco-rollback "
        "restore, or use validate_results or disabled",
    ),
    (
        "--non-persistent-ckpt-type",
        lambda a: a.non_persistent_ckpt_type == "local" and a.loco_save_error != "never",
        "local checkpoints do not hold the error state; use global, or add --loco-save-error never",
    ),
    (
        "--cuda-graph-impl",
        captures_whole_step,
        "a captured step would repeat the warm-up, reset and dither of one step for ever; use another implementation "
        "(until Megatron 0.17: another --cuda-graph-scope) than full_iteration",
    ),
    (
        "--use-nccl-ub",
        lambda a: a.nccl_ub,
        "LoCo sends from its own memory, which is not registered as NCCL user buffers; remove the flag",
    ),
    (
        "--reuse-grad-buf-for-mxfp8-param-ag",
        lambda a: a.reuse_grad_buf_for_mxfp8_param_ag,
        "sharing the gradient buffer with the gather of mxfp8 parameters needs Transformer Engine and is not verified; "
        "remove the flag",
    ),
    (
        "--tensor-parallel-num-weight-shards",
        # Derived by Megatron's validation, and absent before it.
        lambda a: max(getattr(a, "gtp_weight_remat_size", 1), getattr(a, "expert_gtp_weight_remat_size", 1)) > 1,
        "sharded tensor-parallel weights need Transformer Engine and are not verified; remove the flag",
    ),
)
"""``(flag, whether the parsed arguments have the combination, reason and remedy)``."""


def wrap_add_megatron_arguments(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of ``megatron.training.arguments.add_megatron_arguments``."""

    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = stock(parser)
        add_loco_arguments(parser)
        _mend_help(parser)
        return parser

    return add_megatron_arguments


def wrap_validate_args(stock: Callable[..., Any], at_start: Callable[[], None] = lambda: None) -> Callable[..., Any]:
    """Return the replacement of ``megatron.training.arguments.validate_args``.

    Args:
        stock: The original.
        at_start: Called if LoCo is on, before anything else is looked at.
    """

    def validate_args(args: Any, defaults: dict[str, Any] = {}) -> Any:  # noqa: B006 - Megatron's own signature
        # Values first, so that Megatron's own print-out of its arguments shows the effective ones; combinations last,
        # when Megatron has derived what it derives.
        resolve_loco_args(args)
        if config_from_args(args) is not None:
            at_start()
        result = stock(args, defaults)
        check_combinations(args)
        return result

    return validate_args


def wrap_load_yaml(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of ``megatron.training.yaml_arguments.load_yaml``.

    Megatron's ``--yaml-cfg`` throws the parsed command line away, and LoCo would be off without a word.
    """

    def load_yaml(yaml_path: str) -> Any:
        given = [word for word in sys.argv[1:] if word.startswith("--loco-")]
        if given:
            raise ValueError(
                f"{given[0]} has no effect with --yaml-cfg, which replaces the command line; pass Megatron's settings "
                "as flags instead"
            )
        return stock(yaml_path)

    return load_yaml


def add_loco_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the group of ``--loco-*`` flags, one per field of :class:`megatron_loco.config.LoCoConfig`."""
    group = parser.add_argument_group(
        "LoCo",
        "4-bit gradient communication: --loco-bits turns it on. Needs --use-distributed-optimizer.",
    )
    for name, kind, default, metadata in fields():
        # The default is filled in by resolve_loco_args: None tells a flag that was not given from one that was.
        if name == "bits":
            group.add_argument(flag(name), type=_bits, default=None, metavar="{1,2,4,8,32,off}", help=metadata["help"])
        else:
            group.add_argument(
                flag(name),
                type=kind,
                default=None,
                choices=metadata["choices"],
                metavar=None if metadata["choices"] else {int: "N", float: "X", str: "NAME"}[kind],
                help=f"{metadata['help']} Default: {default}.",
            )


def resolve_loco_args(args: Any) -> None:
    """Check the ``--loco-*`` values and fill in the defaults.

    Args:
        args: Megatron's namespace; ``loco_*`` attributes are set to their effective values, all ``None`` where LoCo is
        off.

    Raises:
        ValueError: naming the flag and what is allowed.
    """
    given = {name: getattr(args, f"loco_{name}", None) for name, *_ in fields()}
    if given["bits"] in (None, OFF):
        stray = [flag(name) for name, value in given.items() if name != "bits" and value is not None]
        if stray and given["bits"] is None:
            raise ValueError(f"{', '.join(stray)} has no effect without --loco-bits; add --loco-bits 4 or remove it")
        for name in given:
            setattr(args, f"loco_{name}", None)
        return
    config = LoCoConfig(**{name: value for name, value in given.items() if value is not None})
    for name in given:
        setattr(args, f"loco_{name}", getattr(config, name))


def check_combinations(args: Any) -> None:
    """Refuse what LoCo does not handle, if LoCo is on.

    Args:
        args: Megatron's namespace, after its own validation or at least after parsing.

    Raises:
        ValueError: one message that names every flag in the way, each with its remedy.
    """
    if config_from_args(args) is None:
        return
    problems = [f"{name}: {remedy}" for name, applies, remedy in _UNSUPPORTED if applies(args)]
    if problems:
        raise ValueError("--loco-bits cannot be used like this:\n  " + "\n  ".join(problems))


def config_from_args(args: Any) -> LoCoConfig | None:
    """Return the settings in Megatron's validated namespace, or ``None`` where LoCo is off."""
    if getattr(args, "loco_bits", None) is None:
        return None
    return LoCoConfig(**{name: getattr(args, f"loco_{name}") for name, *_ in fields()})


def _config(args: Any) -> LoCoConfig:
    config = config_from_args(args)
    assert config is not None  # combinations are only looked at where LoCo is on
    return config


def _mend_help(parser: argparse.ArgumentParser) -> None:
    # In megatron-core 0.19 the help of one flag has a bare "%", on which argparse's --help dies with a ValueError.
    for action in parser._actions:
        try:
            (action.help or "") % vars(action)
        except (ValueError, TypeError, KeyError):
            action.help = str(action.help).replace("%", "%%")


def _bits(text: str) -> int | str:
    return OFF if text == OFF else int(text)
