"""The whole launcher, with torchrun replaced by a list of what it was asked to do."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from megatron_loco.launch import __main__, report, torchrun, yaml_file

Config = Callable[[str], str]

SMALL = """
run:
  device: cpu
  nproc_per_node: 2
  corpus: stdlib
loco:
  bits: 4
model:
  num-layers: 2
  hidden-size: 64
  num-attention-heads: 2
  seq-length: 32
  max-position-embeddings: 32
  transformer-impl: local
  no-gradient-accumulation-fusion: true
  no-masked-softmax-fusion: true
  no-persist-layer-norm: true
  no-rope-fusion: true
parallel:
  use-distributed-optimizer: true
training:
  train-iters: 2
  micro-batch-size: 1
  lr: 1e-3
  eval-interval: 2
data:
  split: "98,2,0"
env:
  GREETING: two words
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[list[str], dict[str, str]]]:
    """Runs that would have been started, in an empty current directory."""
    runs: list[tuple[list[str], dict[str, str]]] = []

    def run(words: Sequence[str], environment: Mapping[str, str]) -> int:
        runs.append((list(words), dict(environment)))
        return 0

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(torchrun, "run", run)
    for name in ("DRY_RUN", "MEGATRON_LM_DIR", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return runs


@pytest.fixture
def summaries(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, bool]]:
    """Folders of the summaries that were printed, and whether the entropy of the corpus was known."""
    folders: list[tuple[Path, bool]] = []

    def print_summary(output_dir: Path, unigram_entropy: float | None) -> None:
        folders.append((output_dir, unigram_entropy is not None))

    monkeypatch.setattr(report, "print_summary", print_summary)
    return folders


Started = list[tuple[list[str], dict[str, str]]]


def test_a_run(
    config: Config,
    started: Started,
    summaries: list[tuple[Path, bool]],
    tiny_library: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "pretrain_gpt.py").touch()
    monkeypatch.setenv("MEGATRON_LM_DIR", str(tmp_path))
    assert __main__.main([config(SMALL), "save=a b", "run.name=my run"]) == 0
    (words, environment), *others = started
    assert not others
    assert words[words.index("--nproc-per-node=2") - 1] == "--standalone"
    assert words[words.index("--script") + 1] == str(tmp_path / "pretrain_gpt.py")
    argv = words[words.index("--") + 1 :]
    assert argv[argv.index("--save") + 1] == "a b"
    assert argv[argv.index("--loco-bits") + 1] == "4"
    assert Path(argv[argv.index("--data-path") + 1] + ".bin").is_file()
    assert environment["GREETING"] == "two words"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert summaries == [(Path("runs/my run"), True)]

    out = capsys.readouterr().out
    folder = Path("runs/my run")
    assert (folder / "resolved.yaml").read_text() in out
    assert shlex.join(argv) in out
    recorded = shlex.split((folder / "command.txt").read_text())
    assert recorded[0] == "env"
    assert "GREETING=two words" in recorded
    assert recorded[-len(words) :] == words

    resolved = str(folder / "resolved.yaml")
    assert __main__.main([resolved]) == 0
    assert started[1][0] == words
    assert yaml_file.load(resolved)["run"]["name"].value == "my run"

    # Elsewhere: the same but for the folder, and nothing is written into that of the first run.
    for word, other in (("run.output_dir=again", "again"), ("run.name=b", "runs/b")):
        assert __main__.main([resolved, word]) == 0
        assert started[-1][0] == [f"{other}/tensorboard" if w == "runs/my run/tensorboard" else w for w in words]
        assert Path(other, "resolved.yaml").is_file()


@pytest.mark.parametrize("how", ["option", "variable"])
def test_dry_run_writes_nothing(
    config: Config,
    started: Started,
    tiny_library: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: str,
) -> None:
    if how == "variable":
        monkeypatch.setenv("DRY_RUN", "1")
    # an option between overrides is still an option
    words = ["--dry-run", "train-iters=3"] if how == "option" else ["train-iters=3"]
    assert __main__.main([config(SMALL), "loco.bits=off", *words]) == 0
    out, err = capsys.readouterr()
    assert "--train-iters 3" in out
    assert "--loco" not in out
    assert "loco:\n  bits: off\n" in out
    assert err == ""
    assert list(Path().iterdir()) == []
    assert started == []


def test_a_dry_run_of_several_nodes_needs_none_of_them(
    config: Config, started: Started, tiny_library: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main([config(SMALL), "--dry-run", "run.nnodes=2", "global-batch-size=4"]) == 0
    out, err = capsys.readouterr()
    assert "nnodes: 2" in out
    assert err.startswith("warning: run.nnodes is 2, but the environment lacks NODE_RANK")
    assert started == []


@pytest.mark.kind(32, 34)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lrr=3"], "error: command line: training.lrr: Megatron has no flag --lrr; did you mean lr?"),
        (["run.nnodes=2"], "error: run.nnodes is 2, but the environment lacks NODE_RANK, MASTER_ADDR, MASTER_PORT"),
        (["global-batch-size=3"], "error: global-batch-size 3 cannot be divided by micro-batch-size 1 x 2 "),
        (["fp16=true", "bf16=true"], "error: Megatron refuses these settings: "),
        (["oops"], "error: command line: 'oops' is not KEY=VALUE"),
    ],
)
def test_mistakes_end_with_2_before_anything_is_done(
    config: Config, started: Started, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert __main__.main([config(SMALL), *words]) == 2
    assert capsys.readouterr().err.startswith(message)
    assert list(Path().iterdir()) == []
    assert started == []


def test_status_of_torchrun_is_the_status_and_a_failed_run_has_no_summary(
    config: Config,
    started: Started,
    summaries: list[tuple[Path, bool]],
    tiny_library: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torchrun, "run", lambda words, environment: 17)
    assert __main__.main([config(SMALL)]) == 17
    assert summaries == []


def test_a_complete_run_without_a_log_of_its_own_is_no_failure(
    config: Config, started: Started, tiny_library: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main([config(SMALL), "tensorboard-dir=elsewhere"]) == 0
    assert "note: no summary: runs/small/tensorboard does not exist" in capsys.readouterr().err
    Path("runs/small/tensorboard").mkdir()
    assert __main__.main([config(SMALL)]) == 0
    assert "note: no summary: runs/small/tensorboard holds no scalars" in capsys.readouterr().err


def test_only_the_first_node_writes(
    config: Config,
    started: Started,
    summaries: list[tuple[Path, bool]],
    tiny_library: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"NODE_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}.items():
        monkeypatch.setenv(name, value)
    assert __main__.main([config(SMALL), "run.nnodes=2"]) == 0
    assert "--master-addr=localhost" in started[0][0]
    assert not Path("runs").exists()
    assert summaries == []
