"""``megatron-loco patch``: files of real releases are changed and restored, all or none, and no others are touched."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_loco.integrations.megatron.releases import SOURCES, release_of
from megatron_loco.launch.patch_tree_edit import IMPORT, with_decorators, without
from megatron_loco.launch.patch_tree_files import KNOWN
from megatron_loco.launch.patch_tree_state import targets_by_file
from tests._releases import RELEASES, ROOT, release_folder
from tests.releases._runs import patch_command

PATCHES = ROOT / "patches"
DDP = "megatron/core/distributed/distributed_data_parallel.py"
RERUN = "megatron/core/rerun_state_machine.py"


def _copy(version: str, folder: Path) -> Path:
    """The files that the command reads, of the release's wheel."""
    source = release_folder(version)
    for name in ("megatron/core/package_info.py", "megatron/core/utils.py", *KNOWN[release_of(version)]):
        if (source / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, folder / name)
    return folder


def _contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mode) for path in files}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return _copy("0.18.2", tmp_path)


@pytest.mark.parametrize("version", RELEASES)
def test_apply_status_revert(version: str, tmp_path: Path) -> None:
    tree = _copy(version, tmp_path)
    (tree / DDP).chmod(0o640)
    before = _contents(tree)
    assert patch_command("status", tree)[0] == 1

    status, out, err = patch_command("apply", tree)
    assert (status, err) == (0, "")
    assert f"applied ({len(before) - 2} files, Megatron-core {version})" in out
    patched = _contents(tree)
    changed = {name for name in before if patched[name] != before[name]}
    assert changed == before.keys() - {"megatron/core/package_info.py", "megatron/core/utils.py"}
    assert patched.keys() == before.keys()
    assert all(patched[name][1] == before[name][1] for name in before)
    for name in changed:
        compile(patched[name][0], name, "exec")

    status, out, _ = patch_command("status", tree)
    assert status == 0
    assert ("there is no megatron/training" in out) == (version == "0.16.1")
    status, out, _ = patch_command("apply", tree / "megatron/core")
    assert (status, "already applied" in out) == (0, True)
    assert _contents(tree) == patched

    status, out, _ = patch_command("revert", tree / "megatron")
    assert status == 0
    assert f"reverted ({len(changed)} files, Megatron-core {version})" in out
    assert _contents(tree) == before
    status, out, _ = patch_command("revert", tree)
    assert (status, "nothing to revert" in out) == (0, True)


@pytest.mark.parametrize("version", RELEASES)
def test_patch_files_are_what_the_command_adds(version: str, tmp_path: Path) -> None:
    file = PATCHES / f"megatron-core-{version}.patch"
    status, out, _ = patch_command("diff", release_folder(version))
    assert status == 0
    shipped = dict(re.findall(r"^--- a/(\S+)\n(.*?)(?=^--- a/|\Z)", file.read_text(), flags=re.M | re.S))
    added = dict(re.findall(r"^--- a/(\S+)\n(.*?)(?=^--- a/|\Z)", out, flags=re.M | re.S))
    assert shipped.keys() == KNOWN[release_of(version)].keys()
    # The wheel of 0.16 has only the core, the patch is for checkouts as well.
    core_only = version == "0.16.1"
    assert added == {name: text for name, text in shipped.items() if not core_only or name.startswith("megatron/core/")}
    assert not re.search(r"^-(?!-- a/)", file.read_text(), flags=re.M)

    include = ["--include=megatron/core/*"] if core_only else []
    commands = [["git", "apply", *include, str(file)], ["patch", "-p1", "-s", "-i", str(file)]]
    for command in commands[: 1 if core_only else 2]:
        if shutil.which(command[0]) is None:
            continue
        tree = _copy(version, tmp_path / command[0])
        # Not the repository that the folder of the tests may lie in.
        environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
        subprocess.run(command, cwd=tree, check=True, env=environment)
        assert patch_command("status", tree)[0] == 0


@pytest.mark.parametrize("version", RELEASES)
def test_describe_gives_what_the_tables_hold(version: str) -> None:
    status, out, _ = patch_command("describe", release_folder(version))
    assert status == 0
    described = dict(line.rsplit(": ", 1) for line in out.splitlines() if not line.startswith("#"))
    release = release_of(version)
    for name in targets_by_file(release, training=version != "0.16.1"):
        assert described.pop(name) in KNOWN[release][name]
    relied_on = {target for target in SOURCES if release in SOURCES[target]} & described.keys()
    assert len(relied_on) >= 8
    assert all(described[target] in SOURCES[target][release] for target in relied_on)


def test_locally_changed_file_is_refused_unless_allowed(tree: Path) -> None:
    file = tree / RERUN
    file.write_text(file.read_text() + "\nLOCAL = 1\n")
    before = _contents(tree)
    for action in ("apply", "revert", "diff"):
        status, _, err = patch_command(action, tree)
        assert status == 2
        assert err.startswith("error: ")
        assert f"\n  {RERUN}\nnothing was changed" in err
        assert DDP not in err
    status, out, _ = patch_command("status", tree)
    assert status == 2
    assert f"{RERUN} (not the file of a tested release)" in out
    assert _contents(tree) == before

    assert patch_command("apply", tree, "--allow-unknown-source")[0] == 0
    assert file.read_text().endswith("\nLOCAL = 1\n")
    assert IMPORT in file.read_text()
    assert patch_command("revert", tree, "--allow-unknown-source")[0] == 0
    assert _contents(tree) == before


def test_partly_patched_tree_is_completed_or_reverted(tree: Path) -> None:
    before = _contents(tree)
    assert patch_command("apply", tree)[0] == 0
    patched = _contents(tree)
    (tree / DDP).write_bytes(before[DDP][0])
    # One decorator of two is gone from another file.
    (tree / RERUN).write_text((tree / RERUN).read_text().replace("    @loco_seam\n", "", 1))
    status, out, _ = patch_command("status", tree)
    assert status == 1
    assert "partly applied" in out.splitlines()[0]
    assert f"  not applied    {DDP}" in out
    assert f"  partly applied {RERUN}" in out
    partly = _contents(tree)
    assert patch_command("apply", tree)[0] == 0
    assert _contents(tree) == patched
    for name, (content, _) in partly.items():
        (tree / name).write_bytes(content)
    assert patch_command("revert", tree)[0] == 0
    assert _contents(tree) == before


@pytest.mark.parametrize("failing", [1, 4])
def test_failure_in_the_middle_leaves_all_files_as_they_were(
    tree: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _contents(tree)
    replace, calls = os.replace, 0

    def full_disk(source: Any, target: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(28, "No space left on device", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full_disk)
    status, _, err = patch_command("apply", tree)
    assert (status, "No space left on device; nothing was changed" in err) == (1, True)
    assert calls >= failing
    assert _contents(tree) == before  # nor is a temporary file left


def test_folder_that_cannot_be_written(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _contents(tree)
    folder = tree / "megatron/core/optimizer"

    # Permissions would do for anybody but root.
    def new_file(*args: Any, dir: Path, **settings: Any) -> Any:
        if dir == folder.resolve():
            raise PermissionError(13, "Permission denied", str(dir))
        return original(*args, dir=dir, **settings)

    original = __import__("tempfile").NamedTemporaryFile
    monkeypatch.setattr("megatron_loco.launch.patch_tree.tempfile.NamedTemporaryFile", new_file)
    status, _, err = patch_command("apply", tree)
    assert (status, f"{folder}: Permission denied; nothing was changed" in err) == (1, True)
    assert _contents(tree) == before


def test_unsupported_and_missing_megatron(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    version = tree / "megatron/core/package_info.py"
    text = version.read_text()
    version.write_text(re.sub(r"^MINOR = 18$", "MINOR = 20", text, flags=re.M))
    status, _, err = patch_command("apply", tree)
    assert (status, "megatron-core 0.20.2 is not supported" in err) == (2, True)
    version.write_text(text)

    (tree / RERUN).unlink()
    status, _, err = patch_command("apply", tree)
    assert (status, f"\n  {RERUN}: No such file or directory" in err) == (2, True)
    for path in (tree / "megatron/core/distributed", tmp_path_factory.mktemp("empty"), tree / "missing"):
        status, _, err = patch_command("status", path)
        assert (status, "no Megatron there; name the folder that holds megatron/core" in err) == (2, True)


def test_lines_of_any_kind_survive(tmp_path: Path) -> None:
    text = "import os\r\n\r\n\r\nclass A:\r\n\tdef f(self):\r\n\t\treturn '\x0c'\r\n\r\n@decorated\r\ndef g(): return 1"
    patched = with_decorators(text, ["A.f", "g"])
    assert patched.split("\n") == [
        "import os\r",
        f"{IMPORT}\r",
        "\r",
        "\r",
        "class A:\r",
        "\t@loco_seam\r",
        "\tdef f(self):\r",
        "\t\treturn '\x0c'\r",
        "\r",
        "@loco_seam\r",
        "@decorated\r",
        "def g(): return 1",
    ]
    assert without(patched) == text
    with pytest.raises(ValueError, match=r"has A\.h 0 times, expected once"):
        with_decorators(text, ["A.h"])


@pytest.mark.parametrize("version", RELEASES)
def test_known_files_are_those_of_the_wheel(version: str) -> None:
    folder, known = release_folder(version), KNOWN[release_of(version)]
    names = [name for name in known if (folder / name).exists()]
    assert len(names) == len(known) - (4 if version == "0.16.1" else 0)
    for name in names:
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() in known[name]
