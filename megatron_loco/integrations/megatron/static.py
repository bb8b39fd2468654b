"""LoCo in a Megatron whose files have been changed: one decorator line per function (``megatron-loco patch apply``).

The decorators install the wrappers that a run-time patch would. They share one set of objects per process, and what
Megatron's command line or :func:`megatron_loco.patch` says turns them on; until then Megatron is the stock one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from megatron_loco.config import LoCoConfig
from megatron_loco.integrations.megatron.releases import (
    allow_by_variable,
    compare_with_known,
    has_training,
    megatron_version,
    supported_release,
)
from megatron_loco.integrations.megatron.seams import Seams
from megatron_loco.patching import Patch, PatchHandle, SeamError, apply, decorate, locate

_decorated: dict[str, Callable[..., Any]] = {}
"""Target -> stock function, of all decorators that were executed."""


class _Static(Seams):
    # Checks the tree when LoCo turns out to be on: nobody may ever call patch().
    def __init__(self) -> None:
        super().__init__(at_start=self.check)
        self._is_checked = False

    def active(self) -> LoCoConfig | None:
        config = super().active()
        if config is not None:
            self.check()
        return config

    def check(self, allow_unknown_source: bool | None = None) -> None:
        """Check, once, that all files are patched and that the functions are known ones.

        Args:
            allow_unknown_source: As for :func:`megatron_loco.patch`.

        Raises:
            SeamError: they are not; the message lists every function.
        """
        if self._is_checked:
            return
        allow = allow_by_variable() if allow_unknown_source is None else allow_unknown_source
        release = supported_release(megatron_version(), allow)
        patches = self.patches(release, training=has_training())
        missing = missing_decorators(patches)
        if missing:
            raise SeamError(
                "this Megatron has LoCo's static patch in a part of its files; without a decorator are\n  "
                + "\n  ".join(missing)
                + "\nsee 'megatron-loco patch status PATH'; apply the patch to all of them, or revert it"
            )
        install([replace(patch, kind="check") for patch in patches], allow)
        self._is_checked = True


@cache
def shared() -> _Static:
    """Return the wrappers of this process."""
    return _Static()


def loco_seam(stock: Callable[..., Any], target: str = "") -> Callable[..., Any]:
    """Decorate a function of Megatron in its file.

    Args:
        stock: The function.
        target: ``"module:attribute"``; default: where ``stock`` says that it is defined.

    Raises:
        SeamError: LoCo has nothing to do with the function.
    """
    target = target or f"{stock.__module__}:{stock.__qualname__}"
    seam = next((seam for seam in shared().table if seam.target == target), None)
    if seam is None:
        raise SeamError(f"@loco_seam on {target}: not a function that LoCo changes; remove the decorator")
    _decorated[target] = stock
    return decorate(stock, seam.wrap(stock))


def missing_decorators(patches: list[Patch]) -> list[str]:
    """Import the modules of ``patches``, and return their functions whose file has no decorator for them."""
    for patch in patches:
        try:
            locate(patch.target)  # imports the module, which executes its decorators
        except (ImportError, AttributeError):
            continue  # found out, and said, when the patch is installed or checked
    needed = {seam.target for seam in shared().table} & {patch.target for patch in patches}
    return sorted(needed - _decorated.keys())


def is_static(patches: list[Patch]) -> bool:
    """Whether the Megatron of this process has decorators, in all of its files or in a part of them."""
    missing_decorators(patches)
    return bool(_decorated)


def install(patches: list[Patch], allow_unknown_source: bool) -> PatchHandle:
    """Install ``patches``; an error says which known release Megatron is nearest to.

    Raises:
        SeamError: see :func:`megatron_loco.patching.apply`.
    """
    try:
        return apply(patches, allow_unknown_source=allow_unknown_source)
    except SeamError as error:
        raise SeamError(
            f"{error}\n{compare_with_known()}\nundo the change or install a supported release; functions with an "
            "unknown source are let through by allow_unknown_source=True or MEGATRON_LOCO_ALLOW_UNKNOWN_SOURCE=1, at "
            "your own risk"
        ) from error


class StaticHandle(PatchHandle):
    """The handle for a Megatron with decorators: they stay, :meth:`remove` takes the settings away."""

    def __init__(self, config: LoCoConfig | None) -> None:
        super().__init__([])
        self._targets = tuple(_decorated)
        shared().config = config

    @property
    def targets(self) -> tuple[str, ...]:
        """The decorated functions, in order of import; none after :meth:`remove`."""
        return self._targets

    def original(self, target: str) -> Any:
        """Return the stock function.

        Raises:
            KeyError: ``target`` is not decorated.
        """
        return _decorated[target]

    def remove(self) -> None:
        """Forget the settings: what Megatron's command line says holds again."""
        if self._targets:
            self._targets = ()
            shared().config = None
