"""``megatron-loco patch``: put LoCo into the files of a Megatron, for those who keep their own copy of it."""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from megatron_loco.launch.patch_tree_edit import ASSIGNED, find_function, first_line, unified_diff
from megatron_loco.launch.patch_tree_state import APPLIED, NOT_APPLIED, Tree, TreeFile, read_tree, targets_by_file
from megatron_loco.patching import fingerprint_text

_ALLOW = "--allow-unknown-source"

_ACTIONS = {
    "apply": "add LoCo's decorators to Megatron's files",
    "revert": "take them out again; the files are then byte for byte what they were",
    "status": "say whether they are there, file by file",
    "diff": "print what apply adds, for patch -p1 or git apply; changes nothing",
    "describe": "print what our tables need to know of a new release",
}

_EPILOG = f"""
PATH is the folder that holds megatron/core (a Megatron-LM checkout, or site-packages), or megatron/core itself.

All files are looked at before the first is written, and all are written or none. A file that is not the release's own
is refused, unless {_ALLOW} is given: what it changes in the functions concerned is yours to look at.

exit status:
  apply, revert, diff, describe   0 done, or there was nothing to do; 1 a file could not be written, and none was
                                  changed; 2 wrong usage, no Megatron, an unsupported release or unknown files
  status                          0 applied to all files; 1 to none, or to a part of them; 2 as above

examples:
  megatron-loco patch apply ~/Megatron-LM
  megatron-loco patch status ~/Megatron-LM
  megatron-loco patch revert ~/Megatron-LM
  megatron-loco patch apply "$(python -c 'import megatron.core as m; print(m.__path__[0])')"
  megatron-loco patch diff ~/Megatron-LM > loco.patch"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see its ``--help``.

    Args:
        argv: Arguments of the command line; ``None`` takes those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="megatron-loco patch",
        description="LoCo in Megatron's files: the smallest change that calls what megatron_loco.patch() calls.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
    for name, text in _ACTIONS.items():
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("path", type=Path, metavar="PATH")
        action.add_argument(_ALLOW, action="store_true", help="also for files that are not a tested release's")
    options = parser.parse_args(argv)
    try:
        tree = read_tree(options.path, options.allow_unknown_source)
        if options.action == "status":
            return _status(tree)
        if options.action == "describe":
            return _describe(tree)
        if not options.allow_unknown_source:
            _refuse_unknown(tree)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.action == "diff":
        return _diff(tree)
    return _write(tree, apply=options.action == "apply")


def replace_all(contents: dict[Path, bytes]) -> None:
    """Replace the content of every file, or of none; modes stay.

    Raises:
        OSError: a file could not be written; all have their old content.
    """
    # New files that take the place of the old ones: who has one open keeps reading it, and other names of the same
    # content, as in the cache from which uv installs, are left alone. What takes space on the disk comes first.
    with ExitStack() as temporary:
        new = {path: _beside(path, content, temporary) for path, content in contents.items()}
        old = {path: _beside(path, path.read_bytes(), temporary) for path in contents}
        replaced: list[Path] = []
        try:
            for path in contents:
                os.replace(new[path], path)
                replaced.append(path)
        except BaseException:
            for path in replaced:
                os.replace(old[path], path)
            raise


def _beside(path: Path, content: bytes, temporary: ExitStack) -> Path:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        temporary.callback(Path(file.name).unlink, missing_ok=True)
        file.write(content)
    shutil.copymode(path, file.name)
    return Path(file.name)


def _status(tree: Tree) -> int:
    print(f"{tree.root}: Megatron-core {tree.version}, {tree.state}")
    for file in tree.files:
        print(f"  {file.state:<14} {file.name}{'' if file.is_known else ' (not the file of a tested release)'}")
    if not tree.has_training:
        print("  (there is no megatron/training)")
    if tree.unknown:
        return 2
    return 0 if tree.state == APPLIED else 1


def _refuse_unknown(tree: Tree) -> None:
    if tree.unknown:
        raise ValueError(
            f"{tree.root}: not the files of Megatron-core {tree.release} that were tested (version {tree.version}):\n  "
            + "\n  ".join(file.name for file in tree.unknown)
            + f"\nnothing was changed. Undo what was changed in them, or look at it and pass {_ALLOW}"
        )


def _write(tree: Tree, *, apply: bool) -> int:
    wanted = APPLIED if apply else NOT_APPLIED
    changed = {file.path: _wanted(file, apply) for file in tree.files if file.state != wanted}
    if not changed:
        print(f"{tree.root}: {'already applied' if apply else 'nothing to revert'}")
        return 0
    try:
        replace_all(changed)
    except OSError as error:
        print(f"error: {error.filename or tree.root}: {error.strerror}; nothing was changed", file=sys.stderr)
        return 1
    print(f"{tree.root}: {'applied' if apply else 'reverted'} ({len(changed)} files, Megatron-core {tree.version})")
    return 0


def _wanted(file: TreeFile, apply: bool) -> bytes:
    return file.patched if apply else file.stock


def _diff(tree: Tree) -> int:
    for file in tree.files:
        sys.stdout.writelines(unified_diff(file.name, file.stock.decode(), file.patched.decode()))
    return 0


def _describe(tree: Tree) -> int:
    print(f"# Megatron-core {tree.version}: SHA-256 for patch_tree_files.KNOWN")
    for file in tree.files:
        print(f"{file.name}: {hashlib.sha256(file.stock).hexdigest()}")
    print("# fingerprints for releases.SOURCES (of the functions that it lists)")
    names = targets_by_file(tree.release, training=tree.has_training)
    for file in tree.files:
        text = file.stock.decode()
        for name in names[file.name]:
            if name != ASSIGNED:
                node = find_function(ast.parse(text), name)
                source = "\n".join(text.split("\n")[first_line(node) : node.end_lineno])
                print(f"{file.name.removesuffix('.py').replace('/', '.')}:{name}: {fingerprint_text(source)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
