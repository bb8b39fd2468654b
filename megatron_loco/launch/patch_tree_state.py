"""What a tree of Megatron's files looks like to the static patch: its release, and the state of every file."""

from __future__ import annotations

import ast
import hashlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from megatron_loco.integrations.megatron.releases import supported_release
from megatron_loco.integrations.megatron.seams import Seams
from megatron_loco.launch.patch_tree_edit import with_decorators, without
from megatron_loco.launch.patch_tree_files import KNOWN
from megatron_loco.patching import SeamError

APPLIED, NOT_APPLIED, PARTLY = "applied", "not applied", "partly applied"
_VERSION_FILE = "megatron/core/package_info.py"


@dataclass(frozen=True)
class TreeFile:
    """One file that the patch changes.

    Attributes:
        path: Where it is; symbolic links are followed, so that they stay.
        name: Its path in the tree.
        content: As it is.
        stock: Without our lines.
        patched: With all of them.
        is_known: Whether ``stock`` is that of the release.
    """

    path: Path
    name: str
    content: bytes
    stock: bytes
    patched: bytes
    is_known: bool

    @property
    def state(self) -> str:
        """``APPLIED``, ``NOT_APPLIED`` or ``PARTLY``."""
        return {self.patched: APPLIED, self.stock: NOT_APPLIED}.get(self.content, PARTLY)


@dataclass(frozen=True)
class Tree:
    """What :func:`read_tree` found.

    Attributes:
        root: Holds ``megatron/``.
        version: Of its Megatron-core.
        release: The supported release that it is taken for.
        has_training: Whether ``megatron/training`` is there.
        files: Those that the patch changes.
    """

    root: Path
    version: str
    release: str
    has_training: bool
    files: tuple[TreeFile, ...]

    @property
    def state(self) -> str:
        """That of all files, if they are alike, else ``PARTLY``."""
        states = {file.state for file in self.files}
        return states.pop() if len(states) == 1 else PARTLY

    @property
    def unknown(self) -> list[TreeFile]:
        """Files that are not those of the release, our lines apart."""
        return [file for file in self.files if not file.is_known]


def read_tree(path: Path, allow_unknown: bool = False) -> Tree:
    """Read a Megatron tree.

    Args:
        path: The folder that holds ``megatron/core`` (a checkout, ``site-packages``), or one of these two.
        allow_unknown: Take an unsupported version for the next older release.

    Raises:
        ValueError: there is no Megatron in ``path``, its version is not supported, or a file is missing or does not
            have the functions that the patch decorates.
    """
    root = find_root(path)
    version = _version(root / _VERSION_FILE)
    try:
        release = supported_release(version, allow_unknown)
    except SeamError as error:
        raise ValueError(f"{root}: {error}") from error
    has_training = (root / "megatron/training").is_dir()
    files, problems = [], []
    for name, targets in targets_by_file(release, training=has_training).items():
        try:
            files.append(_read(root, name, targets, KNOWN[release].get(name, ())))
        except (OSError, ValueError) as error:
            problems.append(f"{name}: {error.strerror if isinstance(error, OSError) else error}")
    if problems:
        raise ValueError(
            f"{root} does not have the functions of Megatron-core {release} that LoCo changes:\n  "
            + "\n  ".join(problems)
        )
    return Tree(root, version, release, has_training, tuple(files))


def find_root(path: Path) -> Path:
    """Return the folder that holds ``megatron/`` of ``path``.

    Raises:
        ValueError: there is none.
    """
    for root in (path, path.resolve().parent, path.resolve().parent.parent):
        if (root / _VERSION_FILE).is_file() and path.resolve() in (root.resolve(), *_inside(root.resolve())):
            return root
    raise ValueError(
        f"{path}: no Megatron there; name the folder that holds megatron/core (a checkout, or site-packages), or "
        "megatron/core itself"
    )


def targets_by_file(release: str, *, training: bool) -> dict[str, list[str]]:
    """Return file -> what to decorate in it, for a release."""
    found: dict[str, list[str]] = defaultdict(list)
    for seam in Seams().table:
        if seam.is_in(release, training=training):
            module, _, name = seam.target.partition(":")
            found[f"{module.replace('.', '/')}.py"].append(name)
    return dict(sorted(found.items()))


def _inside(root: Path) -> tuple[Path, Path]:
    return root / "megatron", root / "megatron/core"


def _version(path: Path) -> str:
    values = {
        target.id: node.value.value
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    try:
        return "{MAJOR}.{MINOR}.{PATCH}{PRE_RELEASE}".format_map(values)
    except KeyError as error:
        raise ValueError(f"{path}: does not say the version ({error} is missing)") from error


def _read(root: Path, name: str, targets: list[str], known: tuple[str, ...]) -> TreeFile:
    path = (root / name).resolve()
    content = path.read_bytes()
    stock = without(content.decode("utf-8"))
    patched = with_decorators(stock, targets)
    assert without(patched) == stock
    return TreeFile(
        path=path,
        name=name,
        content=content,
        stock=stock.encode(),
        patched=patched.encode(),
        is_known=hashlib.sha256(stock.encode()).hexdigest() in known,
    )
