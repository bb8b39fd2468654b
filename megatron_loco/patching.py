"""Named, validated, reversible patches: the one mechanism by which this package changes somebody else's module.

Rules (each has a test):

1. The kind is written, ``replace``, ``wrap`` or ``check``, never guessed.
2. All patches of a set are validated (the target exists, has the expected parameters and, where given, a known source)
   before the first one is installed; one error lists every mismatch.
3. ``apply`` returns a handle; ``remove`` restores in reverse order and refuses when somebody patched on top.
4. An unknown source is an error, unless the caller says ``allow_unknown_source=True``.

A function may also have been changed in its file, by a decorator line (``megatron-loco patch apply``); what is known
here about those is how to see the original in them: :func:`decorate` and :func:`stock_of`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

DECORATOR = "@loco_seam"
"""The line that a static patch adds above a function."""

_MARK = "__loco_stock__"


class SeamError(RuntimeError):
    """A patch target is missing, has another signature or another source than the ones it was written for."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One replacement of one attribute, or one that is relied on as it is.

    Attributes:
        target: ``"package.module:Class.attribute"`` or ``"package.module:function"``.
        kind: ``replace`` installs ``new``; ``wrap`` installs ``new(original)``; ``check`` only validates.
        new: The replacement, or for ``wrap`` a function from the original to the replacement.
        why: What breaks without this patch; shown in errors and in the documentation of the seams.
        parameters: Names of parameters that the original must accept, or ``None`` not to look.
        sources: Fingerprints (:func:`fingerprint`) of the sources that this patch was tested on, or ``None``.
    """

    target: str
    kind: Literal["replace", "wrap", "check"]
    why: str
    new: Any = None
    parameters: tuple[str, ...] | None = None
    sources: frozenset[str] | None = None


@dataclass(frozen=True)
class _Installed:
    patch: Patch
    owner: Any
    name: str
    original: Any
    was_own: bool
    replacement: Any


class PatchHandle:
    """Installed patches; a context manager, or call :meth:`remove`."""

    def __init__(self, installed: list[_Installed]) -> None:
        self._installed = installed

    @property
    def targets(self) -> tuple[str, ...]:
        """Targets of the patches that are installed, in order."""
        return tuple(i.patch.target for i in self._installed)

    def original(self, target: str) -> Any:
        """Return what stood at ``target`` before.

        Raises:
            KeyError: no patch of ``target`` is installed.
        """
        for item in self._installed:
            if item.patch.target == target:
                return item.original
        raise KeyError(target)

    def remove(self) -> None:
        """Restore every original in reverse order; a second call does nothing.

        Raises:
            RuntimeError: somebody replaced a patched attribute afterwards. Nothing is restored then.
        """
        foreign: list[str] = []
        standing: dict[tuple[int, str], Any] = {}
        for item in reversed(self._installed):
            # Undone in thought: two patches of one attribute lie on top of each other.
            key = (id(item.owner), item.name)
            if standing.get(key, _own(item.owner, item.name)) is not item.replacement:
                foreign.append(item.patch.target)
            standing[key] = item.original
        if foreign:
            raise RuntimeError(
                f"cannot remove patches: {', '.join(foreign)} was replaced by somebody else afterwards; undo that first"
            )
        while self._installed:
            _restore(self._installed.pop())

    def __enter__(self) -> PatchHandle:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def apply(patches: Iterable[Patch], *, allow_unknown_source: bool = False) -> PatchHandle:
    """Validate all ``patches``, then install them in order.

    Args:
        patches: What to install.
        allow_unknown_source: Install although the source of a target differs from all that were tested.

    Raises:
        SeamError: at least one target does not fit; the message lists every mismatch and nothing was installed.
    """
    found: list[tuple[Patch, Any, str]] = []
    problems: list[str] = []
    for patch in patches:
        try:
            owner, name = locate(patch.target)
            original = getattr(owner, name)
        except (ImportError, AttributeError, ValueError, TypeError) as error:  # the last two: a malformed target
            problems.append(f"{patch.target}: not found ({error})")
            continue
        problems += _mismatches(patch, original, allow_unknown_source)
        found.append((patch, owner, name))
    if problems:
        raise SeamError("cannot patch:\n  " + "\n  ".join(problems))
    installed: list[_Installed] = []
    try:
        for patch, owner, name in found:
            if patch.kind != "check":
                installed.append(_install(patch, owner, name))
    except BaseException:
        while installed:
            _restore(installed.pop())
        raise
    return PatchHandle(installed)


def fingerprint(function: Callable[..., Any]) -> str:
    """Return 16 hex digits that identify the source text of ``function``, indentation and our decorator apart."""
    function = stock_of(function)
    # torch.no_grad and its like stand in the text of what they decorate. Nobody else's wrapper is looked into, which
    # getsource would do: the text is that of the code object.
    while getattr(function, "__globals__", {}).get("__name__") == "torch.utils._contextlib":
        function = function.__wrapped__  # type: ignore[attr-defined]
    return fingerprint_text(inspect.getsource(getattr(function, "__code__", function)))


def fingerprint_text(source: str) -> str:
    """Return what :func:`fingerprint` does for a function with this text, its decorators included."""
    lines = [line.rstrip() for line in textwrap.dedent(source).splitlines()]
    if lines[0] == DECORATOR:
        del lines[0]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def decorate(stock: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``replacement`` look like ``stock``, which :func:`stock_of` finds in it."""
    functools.update_wrapper(replacement, stock)
    # With its owner: whoever wraps it once more, by functools.wraps, copies the mark.
    setattr(replacement, _MARK, (replacement, stock))
    return replacement


def stock_of(function: Any) -> Any:
    """Return what stood under our decorator; of any other function, itself."""
    owner, stock = getattr(function, _MARK, (None, None))
    return stock if owner is not None and owner is function else function


def locate(target: str) -> tuple[Any, str]:
    """Return the object that ``target`` is an attribute of, importing its module, and the attribute's name."""
    module_name, _, path = target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


def _mismatches(patch: Patch, original: Any, allow_unknown_source: bool) -> list[str]:
    problems = []
    if patch.kind not in ("replace", "wrap", "check"):
        problems.append(f"{patch.target}: kind must be 'replace', 'wrap' or 'check', got {patch.kind!r}")
    if patch.parameters is not None:
        try:
            actual_parameters = set(inspect.signature(original).parameters)
        except (TypeError, ValueError):  # not callable, or written in C without a signature
            actual_parameters = set()
        missing = [p for p in patch.parameters if p not in actual_parameters]
        if missing:
            problems.append(f"{patch.target}: has no parameter {', '.join(missing)}")
    if patch.sources is not None and not allow_unknown_source:
        try:
            actual = fingerprint(original)
        except (TypeError, OSError):  # not a Python function, or its file is not there
            actual = "without text"
        if actual not in patch.sources:
            problems.append(
                f"{patch.target}: unknown source {actual} (tested: {', '.join(sorted(patch.sources))}); the file was "
                "modified or the release is not supported"
            )
    return problems


_ABSENT = object()


def _own(owner: Any, name: str) -> Any:
    # vars() and not getattr(): a class attribute must be compared as stored, without binding.
    return vars(owner).get(name, _ABSENT)


def _install(patch: Patch, owner: Any, name: str) -> _Installed:
    was_own = name in vars(owner)
    original = vars(owner)[name] if was_own else getattr(owner, name)
    replacement = patch.new(original) if patch.kind == "wrap" else patch.new
    setattr(owner, name, replacement)
    return _Installed(patch, owner, name, original, was_own, replacement)


def _restore(item: _Installed) -> None:
    # An attribute that was inherited (torch.Tensor.cuda lives in a C base) must be inherited again, not copied.
    if item.was_own:
        setattr(item.owner, item.name, item.original)
    else:
        delattr(item.owner, item.name)
