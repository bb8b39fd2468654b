"""The shell scripts, with stub interpreters in a folder that stands for the machine: no network, nothing installed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), ROOT / ".ci" / "run"])
TOOLS = "bash cat cp cut dirname find flock grep head ls mkdir mv rm sed sha256sum sleep du".split()
STACK = "torch megatron.core megatron.training numpy ruamel.yaml rich psutil einops tensorboard"

# What bootstrap.sh asks of an interpreter; `-m venv` copies the environment's own stub, below.
PYTHON_STUB = """#!{bash}
case "$*" in
  *ensurepip*) echo "{version} linux-x86_64 {modules} {folder}" ;;
  "-P -c "*) echo "{missing}" ;;
  "-c "*) echo "{version}" ;;
  --version) echo "Python {version}.0" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "{folder}/venv_stub" "$3/bin/python" ;;
  *) exit 99 ;;
esac
"""
VENV_STUB = """#!{bash}
bin=${{BASH_SOURCE[0]%/*}}
case "$*" in
  *ensurepip*) echo "3.12 linux-x86_64 venv ${{bin%/bin}}" ;;
  "-P -c "*) ;;
  "-m pip install "*)
    echo "pip $*" >> "{folder}/log"
    [ ! -e "{folder}/pip_fails" ] || {{ cat "{folder}/pip_fails" >&2; exit 1; }}
    case "$*" in *" uv") cp "{folder}/uv_stub" "$bin/uv" ;; esac ;;
  *) exit 99 ;;
esac
"""
UV_STUB = """#!{bash}
echo "uv $*" >> "{folder}/log"
{action}
"""
BROKEN_SHIM = "#!{bash}\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"
UNSUITABLE = "#!{bash}\n[ \"$1\" != --version ] || echo 'Python 3.11.7'\nexit 1\n"


class Machine:
    """A checkout, a home and a PATH in one temporary folder, and nothing from the real machine but the tools."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkout = folder / "check out"  # spaces have to survive
        self.bin = folder / "bin"
        self.venv = self.checkout / ".venv"
        self.stamp = self.venv / ".megatron-loco.stamp"
        for path in (self.checkout / "scripts", self.bin, folder / "home"):
            path.mkdir(parents=True)
        for tool in TOOLS:
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)
        text = (ROOT / "scripts" / "bootstrap.sh").read_text()
        for prefix in (" /opt/", " /usr/"):  # where it looks besides PATH and HOME
            assert prefix in text
            text = text.replace(prefix, f" '{folder}'{prefix.strip()}")
        (self.checkout / "scripts" / "bootstrap.sh").write_text(text)
        (self.checkout / "requirements.lock").write_text("torch==0\n")
        (self.checkout / "setup.py").write_text("")
        self.executable(folder / "venv_stub", VENV_STUB)
        self.executable(folder / "uv_stub", UV_STUB, action="exit 0")

    def executable(self, path: Path, text: str, **values: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(bash=shutil.which("bash"), folder=self.folder, **values))
        path.chmod(0o755)
        return path

    def python(self, path: str, version: str = "3.12", missing: str = STACK, modules: str = "venv") -> Path:
        return self.executable(self.folder / path, PYTHON_STUB, version=version, missing=missing, modules=modules)

    def start(self, script: str = "bootstrap.sh", *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["bash", str(self.checkout / "scripts" / script), *arguments],
            env={"PATH": str(self.bin), "HOME": str(self.folder / "home"), **environment},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a stub that kills its process group must not take pytest along
        )

    def run(
        self, script: str = "bootstrap.sh", *arguments: str, **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        process = self.start(script, *arguments, **environment)
        out, err = process.communicate(timeout=30)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def installs(self) -> list[str]:
        log = self.folder / "log"
        return log.read_text().splitlines() if log.exists() else []

    def assert_made(self, done: "subprocess.CompletedProcess[str]") -> None:
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{self.venv}/bin/python\n"
        assert self.stamp.is_file()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_second_call_does_nothing(machine: Machine) -> None:
    machine.python("bin/python3.12")
    first = machine.run()
    machine.assert_made(first)
    assert "done in" in first.stderr
    uv, lock, checkout = machine.installs()
    assert uv.endswith(" uv")
    assert lock.startswith("uv pip install --no-cache ")
    assert checkout.endswith(f"--no-deps --no-build-isolation --editable {machine.checkout}")

    second = machine.run()
    machine.assert_made(second)
    assert second.stderr == ""
    assert len(machine.installs()) == 3


def test_interpreters_that_do_not_run_or_do_not_fit_are_skipped(machine: Machine) -> None:
    machine.executable(machine.bin / "python3.12", BROKEN_SHIM)
    machine.executable(machine.bin / "python3", UNSUITABLE)
    good = machine.python("home/.pyenv/versions/3.13.0/bin/python3", version="3.13")
    done = machine.run()
    machine.assert_made(done)
    assert f"with {good}\n" in done.stderr


def test_nothing_found_is_one_sentence(machine: Machine) -> None:
    machine.executable(machine.bin / "python3", UNSUITABLE)
    done = machine.run()
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "no Python 3.12 or 3.13" in done.stderr
    assert "PYTHON=" in done.stderr
    assert "uv" in done.stderr
    assert not machine.venv.exists()


@pytest.mark.parametrize(
    ("text", "said"), [(UNSUITABLE, "Python 3.11.7"), (BROKEN_SHIM, "command not found"), ("", "not there")]
)
def test_unsuitable_given_python_stops(machine: Machine, text: str, said: str) -> None:
    machine.python("bin/python3.12")
    given = machine.folder / "given"
    if text:
        machine.executable(given, text)
    done = machine.run(PYTHON=str(given))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"PYTHON={given}" in done.stderr
    assert said in done.stderr
    assert not machine.venv.exists()


def test_given_python_is_the_only_one_asked(machine: Machine) -> None:
    machine.python("bin/python3", missing="")  # would be used as it is
    given = machine.python("given/python3")
    done = machine.run(PYTHON=str(given))
    machine.assert_made(done)
    assert f"with {given}\n" in done.stderr


def test_given_python_of_another_version_makes_it_anew(machine: Machine) -> None:
    machine.python("bin/python3.12")
    machine.assert_made(machine.run())
    given = machine.python("given/python3", version="3.13")
    assert f"with {given}\n" in machine.run(PYTHON=str(given)).stderr


@pytest.mark.parametrize("variable", [False, True])
def test_environment_with_the_stack_is_used_untouched(machine: Machine, variable: bool) -> None:
    active = machine.python("bin/python3", missing="")
    done = machine.run(**({"PYTHON": "python3"} if variable else {}))
    assert (done.returncode, done.stdout) == (0, f"{active}\n")
    assert not machine.venv.exists()


def test_environment_with_torch_alone_gets_a_note(machine: Machine) -> None:
    active = machine.python("bin/python3", missing="megatron.core megatron.training")
    done = machine.run()
    machine.assert_made(done)
    assert f"{active} has torch, but not megatron.core megatron.training" in done.stderr


def test_half_made_environment_that_is_active_is_not_taken_for_complete(machine: Machine) -> None:
    machine.python("bin/python3.12")
    machine.assert_made(machine.run())
    machine.stamp.unlink()
    done = machine.run(PATH=f"{machine.venv}/bin:{machine.bin}")
    machine.assert_made(done)
    assert "making" in done.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("No space left on device", "the disk is full"),
        ("Temporary failure in name resolution", "PIP_INDEX_URL"),
        ("metadata-generation-failed", "see the messages above"),
    ],
)
def test_failed_installation_leaves_no_stamp_and_is_repaired(machine: Machine, error: str, said: str) -> None:
    machine.python("bin/python3.12")
    (machine.folder / "pip_fails").write_text(error)
    done = machine.run()
    assert (done.returncode, done.stdout) == (1, "")
    assert error in done.stderr
    assert said in done.stderr.splitlines()[-1]
    assert not (machine.venv / "bin").exists()
    assert not machine.stamp.exists()

    (machine.folder / "pip_fails").unlink()
    machine.assert_made(machine.run())


def test_pip_takes_over_when_uv_fails(machine: Machine) -> None:
    machine.python("bin/python3.12")
    machine.executable(machine.folder / "uv_stub", UV_STUB, action="echo refused >&2; exit 2")
    done = machine.run()
    machine.assert_made(done)
    assert "trying pip" in done.stderr
    assert machine.installs()[2].endswith("requirements.lock")


def test_killed_call_is_repaired_by_the_next(machine: Machine) -> None:
    machine.python("bin/python3.12")
    machine.executable(machine.folder / "uv_stub", UV_STUB, action="kill -KILL 0")
    assert machine.run().returncode != 0
    assert not machine.stamp.exists()
    (machine.venv / "left over").touch()
    machine.executable(machine.folder / "uv_stub", UV_STUB, action="exit 0")
    machine.assert_made(machine.run())
    assert not (machine.venv / "left over").exists()


@pytest.mark.parametrize("changed", ["requirements.lock", "setup.py"])
def test_changed_requirements_make_it_anew(machine: Machine, changed: str) -> None:
    machine.python("bin/python3.12")
    machine.assert_made(machine.run())
    (machine.checkout / changed).write_text("# changed\n")
    assert "making" in machine.run().stderr


def test_moved_checkout_makes_it_anew(machine: Machine) -> None:
    machine.python("bin/python3.12")
    machine.assert_made(machine.run())
    machine.checkout = machine.checkout.rename(machine.folder / "moved")
    assert "making" in machine.run().stderr


@pytest.mark.skipif(shutil.which("flock") is None, reason="no flock: calls do not wait for each other")
def test_concurrent_calls_make_it_once(machine: Machine) -> None:
    machine.python("bin/python3.12")
    machine.executable(machine.folder / "uv_stub", UV_STUB, action="sleep 0.5")
    processes = [machine.start() for _ in range(3)]
    outputs = [process.communicate(timeout=30)[0] for process in processes]
    assert outputs == [f"{machine.venv}/bin/python\n"] * 3
    assert len(machine.installs()) == 3


def test_a_folder_of_somebody_else_is_left_alone(machine: Machine) -> None:
    machine.python("bin/python3.12")
    theirs = machine.folder / "theirs"
    theirs.mkdir()
    (theirs / "thesis.txt").touch()
    done = machine.run(VENV="theirs")
    assert (done.returncode, done.stdout) == (1, "")
    assert str(theirs) in done.stderr
    assert [path.name for path in theirs.iterdir()] == ["thesis.txt"]


def test_python_without_ensurepip(machine: Machine) -> None:
    machine.python("bin/python3.12", modules="bare")
    done = machine.run()
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "python3.12-venv" in done.stderr

    copy = f'mkdir -p "${{@: -1}}/bin" && cp "{machine.folder}/venv_stub" "${{@: -1}}/bin/python"'
    make = f'[ "$1" != venv ] || {{ {copy}; }}'
    machine.executable(machine.bin / "uv", UV_STUB, action=make)
    machine.assert_made(machine.run())


# --- the other scripts


@pytest.fixture
def scripts(machine: Machine) -> Machine:
    """The real scripts around a bootstrap that answers with an interpreter which prints how it was called."""
    for name in ("pretrain_gpt.sh", "run_tests.sh"):
        shutil.copy(ROOT / "scripts" / name, machine.checkout / "scripts")
    machine.executable(
        machine.folder / "answer", '#!{bash}\nprintf \'<%s>\' "$PWD" "$PYTHONPATH" "$@"\necho\n{action}\n', action=""
    )
    (machine.checkout / "scripts" / "bootstrap.sh").write_text(f"echo '{machine.folder}/answer'\n")
    return machine


@pytest.mark.kind(32)
def test_pretrain_passes_arguments_unharmed(scripts: Machine) -> None:
    done = scripts.run("pretrain_gpt.sh", "a config.yaml", "run.output_dir=/tmp/a b", "x=*", PYTHONPATH="/theirs")
    assert done.returncode == 0
    words = [scripts.folder, f"{scripts.checkout}:/theirs", "-m", "megatron_loco.launch", "a config.yaml"]
    assert done.stdout == "".join(f"<{word}>" for word in [*words, "run.output_dir=/tmp/a b", "x=*"]) + "\n"


def test_pretrain_without_arguments_shows_its_usage(scripts: Machine) -> None:
    done = scripts.run("pretrain_gpt.sh")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage:")


@pytest.mark.kind(32)
def test_pretrain_stops_when_the_bootstrap_fails(scripts: Machine) -> None:
    (scripts.checkout / "scripts" / "bootstrap.sh").write_text("exit 1\n")
    done = scripts.run("pretrain_gpt.sh", "config.yaml")
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize(("fails", "status"), [("none", 0), ("ruff", 1), ("mypy", 1), ("pytest", 5)])
def test_run_tests_fails_with_any_check_and_ends_with_pytest(scripts: Machine, fails: str, status: int) -> None:
    action = f'[ "$1 $2" != "-m {fails}" ] || exit 5'
    scripts.executable(scripts.folder / "answer", '#!{bash}\n[ "$1" = -c ] || echo "$*"\n{action}\n', action=action)
    done = scripts.run("run_tests.sh", "-k", "two words")
    assert done.returncode == status
    assert done.stdout.splitlines()[-1] == "-m pytest -k two words"


@pytest.mark.kind(32)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_executable_and_parses(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.kind(32)
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck() -> None:
    subprocess.run(["shellcheck", *map(str, SCRIPTS)], check=True)
