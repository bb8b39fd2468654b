"""Which Megatron releases LoCo supports, and the source in each of the functions whose insides it relies on.

A source is named by its fingerprint (:func:`megatron_loco.patching.fingerprint`). Functions of which LoCo only needs
parameters and result are not listed: teams change ``validate_args`` and ``training_log`` all the time, to no harm.
"""

from __future__ import annotations

import importlib
import importlib.util
import os

from megatron_loco.patching import SeamError, fingerprint, locate

SUPPORTED_RELEASES = ("0.16", "0.17", "0.18", "0.19")
ALLOW_VARIABLE = "MEGATRON_LOCO_ALLOW_UNKNOWN_SOURCE"

_DATA_PARALLEL = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
_BUFFER = "megatron.core.distributed.param_and_grad_buffer"
_BUCKET_GROUP = f"{_BUFFER}:_ParamAndGradBucketGroup"
_FINALIZE = "megatron.core.distributed.finalize_model_grads:finalize_model_grads"
_OPTIMIZER = "megatron.core.optimizer.optimizer"
_RERUN = "megatron.core.rerun_state_machine:RerunStateMachine"
_STASH = "megatron.core.transformer.moe.paged_stash:PagedStashRunner.prepare_for_rerun"
_CHECKPOINTING = "megatron.training.checkpointing"

SOURCES: dict[str, dict[str, tuple[str, ...]]] = {
    f"{_DATA_PARALLEL}.__init__": {
        "0.16": ("933c59af324c907c",),
        "0.17": ("1a2e31f7758c6bf0", "d98639567d5bf044"),  # 0.17.0, 0.17.1
        "0.18": ("a7d892b469674f8b",),
        "0.19": ("bb869de61095e98c",),
    },
    f"{_BUFFER}:_ParamAndGradBucket.__init__": {
        "0.16": ("d94e0841a7884844",),
        "0.17": ("3e15c2a75fa8c75c",),
        "0.18": ("5c8a3544ded244d5",),
        "0.19": ("5c8a3544ded244d5",),
    },
    f"{_BUCKET_GROUP}.start_grad_sync": {
        "0.16": ("f8bf2a666135f6b5",),
        "0.17": ("a4624b3abcbf6782",),
        "0.18": ("a0d6f5e038be27a3",),
        "0.19": ("c896a8c5f7219027",),
    },
    f"{_BUCKET_GROUP}.finish_grad_sync": {
        "0.16": ("b9000189d208743c",),
        "0.17": ("1f8edc6bce1d39a6",),
        "0.18": ("cf54fddc9862751a",),
        "0.19": ("cf54fddc9862751a",),
    },
    f"{_BUCKET_GROUP}.reset": {
        "0.16": ("364e0ed39f17841e",),
        "0.17": ("364e0ed39f17841e",),
        "0.18": ("154bb4d5d1572498",),
        "0.19": ("154bb4d5d1572498",),
    },
    _FINALIZE: {
        "0.16": ("6e707bbdff75d596",),
        "0.17": ("6e707bbdff75d596",),
        "0.18": ("d329b802397145cc",),
        "0.19": ("3f44cc8723b87c16",),
    },
    f"{_OPTIMIZER}:ChainedOptimizer.step": {
        "0.16": ("17b3454f06e34945",),
        "0.17": ("17b3454f06e34945",),
        "0.18": ("ae6434babc7c9220",),
        "0.19": ("48399a27f8ad57f6",),
    },
    f"{_OPTIMIZER}:MixedPrecisionOptimizer.step": {
        "0.16": ("af523f6102885552",),
        "0.17": ("af523f6102885552",),
        "0.18": ("af523f6102885552",),
        "0.19": ("429f011de2a5bc5f",),
    },
    f"{_RERUN}.should_run_forward_backward": dict.fromkeys(SUPPORTED_RELEASES, ("c4a657ce29566e72",)),
    f"{_RERUN}.should_checkpoint_and_exit": {
        "0.16": ("2512497a6b691307",),
        "0.17": ("2512497a6b691307",),
        "0.18": ("317c401458ae0518",),
        "0.19": ("317c401458ae0518",),
    },
    _STASH: {"0.18": ("c977192a65ac1ae4",), "0.19": ("c977192a65ac1ae4",)},
    f"{_CHECKPOINTING}:generate_state_dict": {
        "0.16": ("d2eaaf2515be1848",),
        "0.17": ("d2eaaf2515be1848",),
        "0.18": ("d2eaaf2515be1848",),
        "0.19": ("6b8e7b30febb0ad6",),
    },
    f"{_CHECKPOINTING}:_load_base_checkpoint": {
        "0.16": ("b56a2df166722a8a",),
        "0.17": ("b56a2df166722a8a",),
        "0.18": ("c2b919a4fce3d6f7",),
        "0.19": ("5c7e88fc4f895a5e",),
    },
}
"""Target -> release -> fingerprints; a release that is not named does not have the function."""


def megatron_version() -> str:
    """Return the version of the Megatron-core that this process imports, which need not be the installed one.

    Raises:
        SeamError: there is none.
    """
    try:
        version: str = importlib.import_module("megatron.core").__version__
    except ImportError as error:
        raise SeamError(
            f"megatron-core cannot be imported ({error}); pip install 'megatron-core>=0.16.1,<0.20', or put a checkout "
            "on PYTHONPATH"
        ) from error
    return version


def supported_release(version: str, allow_unknown: bool) -> str:
    """Return which of :data:`SUPPORTED_RELEASES` a version of Megatron-core belongs to.

    Args:
        version: For example ``"0.18.2"``.
        allow_unknown: Take the next older release for one that is none of them.

    Raises:
        SeamError: it is none of them, and not allowed.
    """
    release = release_of(version)
    if release in SUPPORTED_RELEASES:
        return release
    if not allow_unknown:
        raise SeamError(
            f"megatron-core {version} is not supported (tested: {', '.join(SUPPORTED_RELEASES)}); install a supported "
            f"release, or pass allow_unknown_source=True (or set {ALLOW_VARIABLE}=1) at your own risk"
        )
    older = [known for known in SUPPORTED_RELEASES if _numbers(known) < _numbers(release)]
    return older[-1] if older else SUPPORTED_RELEASES[0]


def release_of(version: str) -> str:
    """``"0.18.2+0a1b2c3"`` -> ``"0.18"``."""
    return ".".join(version.split(".")[:2])


def is_older(release: str, than: str) -> bool:
    """Compare two releases."""
    return _numbers(release) < _numbers(than)


def has_training() -> bool:
    """Whether ``megatron.training`` is there; wheels of 0.16 have only ``megatron.core``."""
    return importlib.util.find_spec("megatron.training") is not None


def allow_by_variable() -> bool:
    """Whether the environment allows unknown sources.

    Raises:
        ValueError: the variable has another value than 0 or 1.
    """
    value = os.environ.get(ALLOW_VARIABLE) or "0"
    if value not in ("0", "1"):
        raise ValueError(f"{ALLOW_VARIABLE} must be 0 or 1, got {value!r}")
    return value == "1"


def compare_with_known() -> str:
    """Say which release the functions in :data:`SOURCES` are nearest to, and which of them differ from it."""
    found: dict[str, str] = {}
    for target in SOURCES:
        try:
            owner, name = locate(target)
            found[target] = fingerprint(getattr(owner, name))
        except (ImportError, AttributeError):
            continue  # not in every release
        except (TypeError, OSError):
            found[target] = "without text"
    fitting = {
        release: [target for target, actual in found.items() if actual in SOURCES[target].get(release, ())]
        for release in SUPPORTED_RELEASES
    }
    nearest = max(SUPPORTED_RELEASES, key=lambda release: len(fitting[release]))
    lines = [f"nearest known release: {nearest} ({len(fitting[nearest])} of {len(found)} functions are as there)"]
    for target in found.keys() - set(fitting[nearest]):
        others = [release for release in SUPPORTED_RELEASES if target in fitting[release]]
        lines.append(f"  {target}: {found[target]}{', as in ' + ', '.join(others) if others else ''}")
    return "\n".join([lines[0], *sorted(lines[1:])])


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in release.split("."))
