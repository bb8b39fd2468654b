"""Bad input: one clear line before any rank starts; what only ranks can find ends them all, on every node."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_loco.config import LoCoConfig
from megatron_loco.launch import (
    __main__,
    checkpoint_size,
    corpus,
    overrides,
    preflight,
    preflight_checkpoint,
    preflight_folders,
    preflight_network,
    torchrun,
    yaml_file,
)
from megatron_loco.launch.byte_tokens import write
from megatron_loco.launch.megatron_flags import MegatronFlags
from megatron_loco.launch.run_config import RunConfig
from tests.integrations.megatron import _training
from tests.launch._processes import gone

ROOT = Path(__file__).parents[2]
VOCABULARY = 384  # the bytes and their end, padded to a multiple of 128
SMALL = {
    "run": {"device": "cpu", "nproc_per_node": 2, "output_dir": "out"},
    "loco": {"bits": 4, "warmup_steps": 0},
    "model": {
        **{"num-layers": 2, "hidden-size": 64, "num-attention-heads": 2, "seq-length": 32},
        **{"max-position-embeddings": 32, "transformer-impl": "local", "attention-backend": "unfused"},
        **{"no-gradient-accumulation-fusion": True, "no-masked-softmax-fusion": True, "no-persist-layer-norm": True},
        **{"no-rope-fusion": True, "no-bias-swiglu-fusion": True},
    },
    "data": {"tokenizer-type": "NullTokenizer", "vocab-size": 257, "data-path": ["good"], "split": "98,2,0"},
    "parallel": {"use-distributed-optimizer": True},
    "training": {
        "train-iters": 3,
        "micro-batch-size": 1,
        "global-batch-size": 2,
        "lr": 1e-3,
        "eval-iters": 0,
        "eval-interval": 9,
    },
    "precision": {"bf16": True},
    "checkpoint": {"ckpt-format": "torch_dist", "save": "saved"},
    "logging": {"log-interval": 1},
}
CLUSTER = {"NODE_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}

Started = list[Sequence[str]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a configuration, good data, and data with a fault each."""
    monkeypatch.chdir(tmp_path)
    for name in ("DRY_RUN", "MEGATRON_LM_DIR", *CLUSTER):
        monkeypatch.delenv(name, raising=False)
    Path("small.yaml").write_text(yaml_file.dump(SMALL), encoding="utf-8")  # type: ignore[arg-type]
    write((f"document {number}: " + "some text " * 9 for number in range(50)), Path("good"))
    for name in ("no_bin", "no_idx", "empty", "cut_short", "longer", "no_index", "cut_index", "large"):
        for suffix in ("bin", "idx"):
            shutil.copy(f"good.{suffix}", f"{name}.{suffix}")
    Path("no_bin.bin").unlink()
    Path("no_idx.idx").unlink()
    Path("empty.bin").write_bytes(b"")
    tokens = Path("good.bin").read_bytes()
    Path("cut_short.bin").write_bytes(tokens[:-1])
    Path("longer.bin").write_bytes(tokens + b"xx")
    Path("no_index.idx").write_text("text")
    Path("cut_index.idx").write_bytes(Path("good.idx").read_bytes()[:-1])
    Path("large.bin").write_bytes(tokens[:-2] + np.uint16(VOCABULARY).tobytes())
    Path("pairs.txt").write_text("0.3 good 0.7 nowhere/tokens")
    Path("splits.json").write_text(json.dumps({"train": ["good"], "valid": "good", "test": ["1", "empty"]}))
    Path("no_splits.json").write_text("[]")
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Commands of the runs that would have been started; each ends well."""
    commands: Started = []

    def run(words: Sequence[str], environment: Mapping[str, str]) -> int:
        commands.append(words)
        return 0

    monkeypatch.setattr(torchrun, "run", run)
    return commands


@pytest.mark.kind(32, 34)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        # 1. data
        (["data-path=[bad]"], "data-path: there is no file bad.idx; a path names the pair PATH.bin and PATH.idx"),
        (["data-path=[bad/tokens]"], "data-path: there is no file bad/tokens.idx (nor a folder bad, seen from /"),
        (["data-path=[good.bin]"], "data-path: there is no file good.bin.idx; name the files without .bin and .idx"),
        (["data-path=[no_bin]"], "data-path: there is no file no_bin.bin"),
        (["data-path=[no_idx]"], "data-path: there is no file no_idx.idx"),
        (["data-path=[empty]"], "data-path: empty.bin has 0 bytes, its index says "),
        (["data-path=[cut_short]"], "data-path: cut_short.bin has "),
        (["data-path=[no_index]"], "data-path: no_index.idx is not an index of Megatron's"),
        (["data-path=[cut_index]"], "data-path: cut_index.idx is cut short or damaged"),
        (["data-path=['0.3', good, '0.7', empty]"], "data-path: empty.bin has 0 bytes"),
        (["data-path=0.3 good 0.7 empty"], "several paths are written as a list: [0.3, first/path, 0.7, second/path]"),
        (["data-path=null"], "there are no data: set data-path, run.corpus=stdlib, or mock-data=true"),
        (["data-path=null", "data-args-path=pairs.txt"], "data-args-path: there is no file nowhere/tokens.idx"),
        (["data-path=null", "data-args-path=no.txt"], "data-args-path: no.txt cannot be read: No such file"),
        (
            ["data-path=null", "split=null", "train-data-path=[good]", "valid-data-path=[empty]"],
            "valid-data-path: empty.bin has 0 bytes",
        ),
        (
            ["data-path=null", "split=null", "per-split-data-args-path=splits.json"],
            "per-split-data-args-path (test): empty.bin has 0 bytes",
        ),
        (
            ["data-path=null", "split=null", "per-split-data-args-path=no_splits.json"],
            "per-split-data-args-path: no_splits.json must be JSON with lists train, valid and test",
        ),
        # 2. tokenizer
        (
            ["data-path=[large]"],
            "data-path: large.bin holds the token 384, but the embedding has 384 rows for a vocabulary of 257",
        ),
        (["vocab-size=null"], "tokenizer-type NullTokenizer has no vocabulary of its own: set vocab-size"),
        (["tokenizer-type=TikTokenizer", "tokenizer-model=no.json"], "tokenizer-type TikTokenizer needs the package"),
        (["vocab-file=no.json"], "vocab-file: there is no file no.json"),
        # 3. a configuration for other ranks
        (
            ["tensor-model-parallel-size=8", "pipeline-model-parallel-size=8"],
            "run.nnodes 1 x run.nproc_per_node 2 = 2 ranks cannot be divided by tensor-model-parallel-size 8 x "
            "pipeline-model-parallel-size 8 = 64: start 64 ranks or a multiple",
        ),
        (["context-parallel-size=4"], "2 ranks cannot be divided by context-parallel-size 4: start 4 ranks"),
        (["num-experts=8", "expert-model-parallel-size=8"], "cannot be divided by expert-model-parallel-size 8: start"),
        (
            ["global-batch-size=3"],
            "global-batch-size 3 cannot be divided by micro-batch-size 1 x 2 data-parallel ranks",
        ),
        (["eval-interval=null"], "eval-interval is missing: Megatron counts validation samples with it, even where"),
        # 5. folders for what is written
        (["save=good.bin"], "is not a folder; set save to a folder that this user can write to on every node"),
        (["save=good.bin/deeper"], "is not a folder; set save to"),
        (["save=/proc/nothing"], "save: /proc/nothing cannot be made in /proc: "),
        (["run.output_dir=/proc/nothing"], "run.output_dir: /proc/nothing cannot be made in /proc: "),
        (["tensorboard-dir=/proc/nothing"], "tensorboard-dir: /proc/nothing cannot be made in /proc: "),
        (["run.corpus=stdlib", "data-path=null", "vocab-size=null", "run.data_dir=/proc/x"], "run.data_dir: /proc"),
        # 7. checkpoints and devices
        (["load=nowhere"], "load: there is no folder nowhere; leave load out to start from random weights"),
        (["load=."], "load: . holds no checkpoint (no file latest_checkpointed_iteration.txt); leave load out"),
        (["load=saved", "exit-on-missing-checkpoint=true"], "load: there is no folder saved; leave exit-on-missing-"),
        (["load=saved", "pretrained-checkpoint=base"], "pretrained-checkpoint: there is no folder base"),
        (
            ["load=saved", "ckpt-step=7"],
            "ckpt-step 7 asks for the checkpoint saved/iter_0000007, which is missing or incomplete; there is no other",
        ),
        (["run.device=cuda"], "run.device is cuda, but torch sees no GPU here"),
    ],
)
def test_one_line_and_nothing_is_started(
    here: Path, started: Started, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    before = sorted(here.iterdir())
    assert __main__.main(["small.yaml", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert started == []
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], ""),
        (["load=saved"], ""),  # the first start of a run that resumes by itself
        (["data-path=['1', good]"], ""),
        (["data-path=null", "mock-data=true"], ""),
        (["data-path=null", "split=null", "train-data-path=[good]", "valid-data-path=[good]"], ""),
        (["save=null"], ""),
        (["global-batch-size=3", "eval-global-batch-size=2", "decrease-batch-size-if-needed=true"], ""),
        (["data-path=[longer]"], "warning: data-path: longer.bin has "),
        (["vocab-size=200", "make-vocab-size-divisible-by=300"], "holds the token 256, but the vocabulary ends at 199"),
        (["vocab-size=70000"], "holds 16-bit tokens, too small for a vocabulary of 70000"),
    ],
)
def test_what_works_is_not_stopped(
    here: Path, started: Started, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert __main__.main(["small.yaml", *words]) == 0
    err = "".join(line for line in capsys.readouterr().err.splitlines(True) if "no summary" not in line)
    assert len(started) == 1
    assert message in err
    assert err.count("\n") == bool(message)


def test_a_dry_run_says_it_too_but_goes_on(here: Path, started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["small.yaml", "data-path=[empty]", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("warning: the run would stop on this machine: data-path: empty.bin has 0 bytes")
    assert "--data-path empty" in out


def test_a_corpus_for_which_there_is_no_room(
    here: Path, started: Started, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(name: str, data_dir: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "data/corpus.bin")

    monkeypatch.setattr(corpus, "prepare", prepare)
    assert __main__.main(["small.yaml", "run.corpus=stdlib", "data-path=null"]) == 2
    err = capsys.readouterr().err
    assert err == "error: run.data_dir: the corpus cannot be prepared: data/corpus.bin: No space left on device\n"
    assert started == []


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    # No machine of the tests has GPUs.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    run = RunConfig(name="r", device="cuda", nproc_per_node=8)
    with pytest.raises(ValueError, match=r"nproc_per_node is 8, but there are 4 GPUs here.* set run\.nproc_per_node=4"):
        preflight._check_devices(run, {})
    with pytest.raises(ValueError, match="there are 2 GPUs here"):
        preflight._check_devices(run, {"CUDA_VISIBLE_DEVICES": "0,3"})
    assert preflight._check_devices(RunConfig(name="r", device="cuda", nproc_per_node=4), {}) == []
    cores = len(os.sched_getaffinity(0))
    (warning,) = preflight._check_devices(RunConfig(name="r", device="cpu", nproc_per_node=cores + 1), {})
    assert f"this machine has {cores} cores" in warning


# --------------------------------------------------------------------------------------------- tokenizers' files


def test_vocabulary_of_a_tokenizer_file(tmp_path: Path) -> None:
    from megatron_loco.launch.preflight_tokenizer import vocabulary_size

    # An id beyond the added tokens, and the other way round: the number of entries is not the size.
    content = {"model": {"vocab": {"a": 0, "b": 9}}, "added_tokens": [{"id": 3}]}
    for added, size in ((3, 10), (11, 12)):
        content["added_tokens"] = [{"id": added}]
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        args = Namespace(tokenizer_model=str(tmp_path))
        assert vocabulary_size(args, "HuggingFaceTokenizer") == size
    (tmp_path / "tokenizer.json").write_text("{}")
    assert vocabulary_size(args, "HuggingFaceTokenizer") is None
    assert vocabulary_size(Namespace(tokenizer_model="org/name"), "HuggingFaceTokenizer") is None


def test_largest_token_of_a_file_larger_than_the_sample(tmp_path: Path) -> None:
    from megatron_loco.launch import preflight_data

    count = 5 * preflight_data._BLOCK_TOKENS + 3
    tokens = np.zeros(count, dtype=np.uint16)
    tokens[[0, -1]] = 7, 8  # first and last block are always among those that are read
    tokens.tofile(tmp_path / "tokens.bin")
    file = preflight_data.TokenFile(tmp_path / "tokens.bin", tokens.dtype, count)
    assert preflight_data._largest_token(file, 2 * preflight_data._BLOCK_TOKENS) == 8
    tokens[0] = 9
    tokens.tofile(tmp_path / "tokens.bin")
    assert preflight_data._largest_token(file, 2 * preflight_data._BLOCK_TOKENS) == 9
    tokens[count // 2] = 10
    tokens.tofile(tmp_path / "tokens.bin")
    assert preflight_data._largest_token(file, count) == 10


# --------------------------------------------------------------------------------------------- network


@pytest.mark.kind(32)
def test_a_taken_port_is_told_by_the_head_node(
    here: Path,
    started: Started,
    taken_port: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in {**CLUSTER, "MASTER_PORT": str(taken_port)}.items():
        monkeypatch.setenv(name, value)
    assert __main__.main(["small.yaml", "run.nnodes=2", "global-batch-size=4"]) == 2
    err = capsys.readouterr().err
    assert err == (
        f"error: MASTER_PORT: port {taken_port} is taken on this machine by another process; set it to a free port, "
        "the same on all nodes\n"
    )
    # On another node of this machine it is the head node that listens there.
    monkeypatch.setenv("NODE_RANK", "1")
    assert __main__.main(["small.yaml", "run.nnodes=2", "run.rendezvous_timeout_s=7", "global-batch-size=4"]) == 0
    assert "--rdzv-conf=timeout=7" in started[0]


@pytest.mark.kind(32)
def test_a_head_node_that_is_not_known(
    here: Path, started: Started, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**CLUSTER, "NODE_RANK": "1", "MASTER_ADDR": "no.such.host.invalid"}.items():
        monkeypatch.setenv(name, value)
    assert __main__.main(["small.yaml", "run.nnodes=2", "global-batch-size=4"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: MASTER_ADDR: 'no.such.host.invalid' does not resolve to an address on this node")
    assert err.count("\n") == 1
    assert started == []


def test_a_free_port_stays_free(taken_port: int, free_port: Callable[[], int]) -> None:
    free = free_port()
    for _ in range(2):
        assert preflight_network.port_problem(free) == ""
    assert f"port {taken_port} is taken" in preflight_network.port_problem(taken_port)


# --------------------------------------------------------------------------------------------- space


def arguments(*words: str) -> Namespace:
    """Megatron's arguments of the small model."""
    return preflight.parse([*_training.MODEL, "--train-iters", "8", "--save", "saved", *words])


def test_size_of_a_checkpoint() -> None:
    run, loco = RunConfig(name="r", nproc_per_node=2), LoCoConfig(bits=4)
    args = arguments()
    from megatron_loco.launch.plan_model import model_from_args

    params = [param for stage in model_from_args(args).stages for param in stage]
    total = sum(param.numel for param in params)
    size = checkpoint_size.estimate(args, run, loco)
    # bf16 weights, and their fp32 copy with Adam's two moments.
    assert size.model == total * (2 + 12)
    # A byte per element and rank, and a scale of 4 bytes for 256 of them; norms have no error.
    assert size.error_state == sum(p.numel for p in params if p.num_dimensions > 1) * 2 * (1 + 4 / 256)
    assert checkpoint_size.estimate(args, run, None).error_state == 0
    for without in (["--no-save-optim"], ["--ckpt-format", "torch"]):
        assert checkpoint_size.estimate(arguments(*without), run, loco).error_state == 0
    assert checkpoint_size.estimate(arguments("--no-save-optim"), run, loco).model == total * 2
    assert checkpoint_size.estimate(args, run, LoCoConfig(bits=4, save_error="never")).error_state == 0
    assert checkpoint_size.estimate(args, RunConfig(name="r"), loco).error_state == 0
    # Summed inside four nodes of two: an error per node.
    nodes = RunConfig(name="r", nproc_per_node=2, nnodes=4)
    flat, two = (checkpoint_size.estimate(args, nodes, LoCoConfig(bits=4, topology=t)) for t in ("flat", "two-level"))
    assert flat.error_state == 4 * size.error_state == 2 * two.error_state


@pytest.mark.parametrize(
    ("checkpoints", "words", "refused", "warned"),
    [
        (0.9, [], True, False),
        (1.9, [], False, False),
        (1.9, ["--save-interval", "4"], False, True),
        (2.1, ["--save-interval", "4"], False, False),
    ],
)
def test_room_for_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoints: float, words: list[str], refused: bool, warned: bool
) -> None:
    args, run, loco = arguments("--save", str(tmp_path), *words), RunConfig(name="r"), LoCoConfig(bits=4)
    free = int(checkpoint_size.estimate(args, run, loco).total * checkpoints)
    monkeypatch.setattr(preflight_checkpoint, "free_bytes", lambda folder: free)
    if refused:
        with pytest.raises(ValueError, match=rf"save: .* MB free for {tmp_path}, and one checkpoint takes about .* MB"):
            preflight_checkpoint.check_save(args, run, loco)
        assert "no checkpoint is complete there" in preflight_checkpoint.full_disk(args, run, loco)
        return
    warnings = preflight_checkpoint.check_save(args, run, loco)
    assert [True for warning in warnings if "the second one will not fit" in warning] == [True] * warned
    assert preflight_checkpoint.full_disk(args, run, loco) == ""


def test_a_model_that_is_not_counted_has_no_size(tmp_path: Path) -> None:
    args = arguments("--save", str(tmp_path), "--multi-latent-attention")
    (warning,) = preflight_checkpoint.check_save(args, RunConfig(name="r"), None)
    assert warning.startswith("save: free space was not compared with the size of a checkpoint (--multi-latent-")
    assert preflight_checkpoint.full_disk(args, RunConfig(name="r"), None) == ""


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system of a fixed size can be mounted: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.kind(34)
def test_a_disk_that_fills_up_costs_the_checkpoint_that_did_not_fit(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"RUN_{uuid.uuid4().hex}"
    disk = here / "disk"
    # Room for one checkpoint and a part of the second: 2.03 MB by the estimate, 2.3 with names and layouts.
    with small_disk(disk, "3900k"):
        words = ["save=disk/saved", "save-interval=1"]
        done = subprocess.run(
            [sys.executable, "-m", "megatron_loco.launch", "small.yaml", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT), mark: "1"},
            capture_output=True,
            text=True,
            timeout=_training.TIMEOUT_S,
        )
        assert gone(mark) == []
        assert done.returncode == 1, done.stderr[-6000:]
        warned = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
        assert len(warned) == 1
        assert "the second one will not fit beside the first" in warned[0]
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert done.stderr.splitlines()[-1] == errors[-1]
        assert "the checkpoint of iteration 1 is complete: load=disk/saved goes on from it" in errors[-1]
        assert "ChildFailedError" not in done.stderr  # torchrun's own traceback
        # The next start is stopped at once.
        args = preflight.parse([*_training.MODEL, "--save", str(disk / "saved"), "--train-iters", "3"])
        with pytest.raises(ValueError, match="MB free for"):
            preflight_checkpoint.check_save(args, RunConfig(name="r"), None)
        # It is whole: the run goes on from it, error state included.
        document = overrides.apply(yaml_file.load("small.yaml"), [f"data-path=[{here}/good]", f"save={here}/elsewhere"])
        flags = [*MegatronFlags.load().argv(document), "--distributed-backend", "gloo"]
        resuming = ["--load", str(disk / "saved"), "--save-interval", "9"]
        loco = ["--loco-bits", "4", "--loco-warmup-steps", "0"]
        monkeypatch.chdir(ROOT)
        resumed = _training._launch_by_fork(_training.LOCO[0], [*_training.LOCO[1:], *flags, *resuming, *loco], 2)
        assert resumed.returncode == 0, resumed.stdout[-6000:]
        assert "goes on with the error state of the checkpoint, at step 1" in resumed.stdout
        assert " iteration        2/       3 |" in resumed.stdout
        check_other_models(disk / "saved", flags)


def check_other_models(saved: Path, flags: Sequence[str]) -> None:
    def load(*words: str) -> list[str]:
        return preflight_checkpoint.check_load(preflight.parse([*flags, "--load", str(saved), *words]))

    assert load() == []
    # Ranks and padding may change, and so may the vocabulary, which Megatron cuts or pads.
    assert load("--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "256") == []
    (warning,) = load("--vocab-size", "300")
    assert "iter_0000001 has 257 tokens, that of this run 300" in warning
    for words, message in (
        (["--ffn-hidden-size", "512"], r"is of another model \(ffn-hidden-size 256 there, 512 here\)"),
        (["--hidden-size", "32", "--num-layers", "4"], r"num-layers 2 there, 4 here; hidden-size 64 there, 32 here"),
        (["--swiglu"], r"swiglu False there, True here"),
        (["--group-query-attention", "--num-query-groups", "1"], r"group-query-attention False there, True here"),
        (["--qk-layernorm"], r"decoder.layers.0.self_attention.q_layernorm.weight: 0 elements there, 32 here"),
        (["--ckpt-step", "2"], r"ckpt-step 2 asks for .*, which is missing or incomplete; there are iter_0000001$"),
    ):
        with pytest.raises(ValueError, match=message):
            load(*words)
    assert load("--hidden-size", "32", "--use-checkpoint-args") == []
    with pytest.raises(ValueError, match="is one checkpoint; name the folder around it"):
        load("--load", str(saved / "iter_0000001"))
    (saved / "iter_0000001" / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"the checkpoint .*iter_0000001 cannot be read"):
        load()
    (saved / preflight_checkpoint.TRACKER).write_text("x")
    with pytest.raises(ValueError, match="must hold the number of an iteration, but holds 'x'"):
        load()
    (saved / preflight_checkpoint.TRACKER).write_text("9")
    with pytest.raises(ValueError, match=r"asks for the checkpoint .*iter_0000009, which is missing or incomplete"):
        load()


def test_folders_are_tried_without_a_trace(tmp_path: Path) -> None:
    preflight_folders.check_folder(tmp_path / "a" / "b", "save")
    preflight_folders.check_folder(tmp_path, "save")
    preflight_folders.check_folder("s3://bucket/folder", "save")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    with pytest.raises(ValueError, match="dangling is not a folder"):
        preflight_folders.check_folder(tmp_path / "dangling", "save")
