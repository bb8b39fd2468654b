"""Ranks that do not mean the same, back ends that do not do what they say, timing, and a rank that dies."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loco.collectives.agreement import check_agreement, settings_facts
from megatron_loco.collectives.self_check import check_collectives
from megatron_loco.config import LoCoConfig
from megatron_loco.launch.report import Run
from tests._ranks import RankPool
from tests.integrations.megatron import _training
from tests.integrations.megatron._ddp import (
    SHAPES,
    Case,
    Prescribed,
    parallel_megatron,
    shards,
    train_step,
    wrap,
)

LOCO = LoCoConfig(bits=4, block_size=32, warmup_steps=0, reset_interval=0, min_bucket_numel=0)
NUM_RANKS = 3


@pytest.fixture
def ranks() -> Iterator[RankPool]:
    """Three ranks that have imported Megatron."""
    with RankPool(NUM_RANKS) as pool:
        yield pool


def _stopped_by(construct: Callable[[], Any]) -> str:
    try:
        construct()
    except ValueError as error:
        return str(error)
    return ""


def _wrap(config: LoCoConfig | None, case: Case, **settings: Any) -> str:
    """What stops the construction of a model on this rank."""
    from megatron_loco import patch

    # Patched where LoCo is off too, as by a command line without --loco-bits.
    with patch(config) if config else patch():
        return _stopped_by(lambda: wrap(case))


def _disagreements(group: dist.ProcessGroup) -> dict[str, str]:
    last = group.rank() == group.size() - 1
    case = Case(overlap=True, bucket_size=700)
    # Buckets of the same sizes, other parameters inside.
    other_order = dataclasses.replace(case, shapes=(SHAPES[2], *SHAPES[1:2], SHAPES[0], *SHAPES[3:]))
    fewer = dataclasses.replace(case, bucket_size=None)
    experts = dataclasses.replace(case, expert_parallel=3)
    changes: dict[str, Any] = {
        "bits": 8,
        "block_size": 64,
        "beta": 0.5,
        "error_bits": 16,
        "exact_params": "none",
        "min_bucket_numel": 1000,
        "save_error": "never",
        "load_error": "never",
        "rollback": "restore",
    }
    with ExitStack() as stack:
        parallel_megatron(stack)
        result = {
            f"--loco-{name.replace('_', '-')}": _wrap(
                dataclasses.replace(LOCO, **{name: value}) if last else LOCO, case
            )
            for name, value in changes.items()
        }
        result["off"] = _wrap(None if last else LOCO, case)
        result["off at first"] = _wrap(None if not last else LOCO, case)
        result["other order"] = _wrap(LOCO, other_order if last else case)
        result["fewer buckets"] = _wrap(LOCO, fewer if last else case)
        result["experts"] = _wrap(LOCO, experts if last else case)
        result["equal"] = _wrap(LOCO, case)
        result["all off"] = _wrap(None, case)
    return result


@pytest.mark.kind(21)
def test_ranks_that_differ_stop_on_all_ranks(ranks: RankPool) -> None:
    for messages in ranks.run(_disagreements, NUM_RANKS):
        assert messages.pop("equal") == ""
        assert messages.pop("all off") == ""
        assert "LoCo: 'on' on rank 0, 'off' on rank 2" in messages.pop("off")
        assert "LoCo: 'off' on rank 0, 'on' on rank 2" in messages.pop("off at first")
        assert "layout of dense bucket" in messages.pop("other order")
        assert "number of buckets: 2 on rank 0, 1 on rank 2" in messages.pop("fewer buckets")
        assert "number of bucket groups of experts: 0 on rank 0" in messages.pop("experts")
        for name, message in messages.items():
            # The field, and nothing else.
            assert message.count("--loco-") == 1
            assert f"{name}: " in message
            assert "on rank 2" in message


def _collectives_of_a_stock_run(group: dist.ProcessGroup, config: LoCoConfig | None) -> tuple[list[str], list[Tensor]]:
    from megatron_loco import patch

    calls: list[str] = []

    @contextmanager
    def counted() -> Iterator[None]:
        with ExitStack() as stack:
            for name in ("all_gather_into_tensor", "all_gather_object", "all_to_all_single", "all_reduce", "broadcast"):
                original = getattr(dist, name)

                def count(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
                    calls.append(_name)
                    return _original(*args, **kwargs)

                stack.enter_context(mock.patch.object(dist, name, count))
            yield

    case = Case(average=True, overlap=True, multiple_of=NUM_RANKS)
    with ExitStack() as stack:
        parallel_megatron(stack)
        with patch(config) if config else patch() if config is None else nullcontext(), counted():
            ddp = wrap(case)
            for step in range(2):
                train_step(ddp, case, group.rank(), step)
        patched = shards(ddp)
        ddp = wrap(case)
        for step in range(2):
            train_step(ddp, case, group.rank(), step)
        return calls, [a - b for a, b in zip(patched, shards(ddp), strict=True)]


def test_where_loco_is_off_one_small_gather_is_all_it_costs(ranks: RankPool) -> None:
    for calls, differences in ranks.run(_collectives_of_a_stock_run, NUM_RANKS, None):
        assert calls == ["all_gather_into_tensor"]
        assert all(not difference.any() for difference in differences)


def _pipeline_stages_differ(group: dist.ProcessGroup) -> str:
    """The data-parallel groups are of one rank each, so that only the first step can tell."""
    from megatron_loco.integrations.megatron.metrics import wrap_training_log

    config = LOCO if group.rank() else None
    log = wrap_training_log(lambda iteration: None, lambda: None, lambda: config)
    return _stopped_by(lambda: log(1))


@pytest.mark.kind(21)
def test_pipeline_stages_that_differ_are_stopped_in_the_first_step(ranks: RankPool) -> None:
    for message in ranks.run(_pipeline_stages_differ, NUM_RANKS):
        assert "LoCo: 'off' on rank 0, 'on' on rank 1" in message


def test_every_setting_is_compared() -> None:
    facts = settings_facts(LOCO)
    for field in dataclasses.fields(LoCoConfig):
        assert facts["--loco-" + field.name.replace("_", "-")] == getattr(LOCO, field.name)
    assert settings_facts(None) == {"LoCo": "off"}


def _facts_of_one(group: dist.ProcessGroup) -> str:
    facts: dict[str, Any] = {"a": 1.0, "b": (1, "x")}
    if group.rank() == 1:
        facts["c"] = 0
    return _stopped_by(lambda: check_agreement(facts, group))


def test_a_fact_that_a_rank_lacks_is_named(ranks: RankPool) -> None:
    for message in ranks.run(_facts_of_one, NUM_RANKS):
        assert "c: unknown on rank 0" in message
        assert "a:" not in message


def _broken(group: dist.ProcessGroup, name: str) -> dict[str, str]:
    """A collective that goes wrong on one rank only."""
    original = getattr(dist, name)

    def divides_nothing(output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, **kwargs: Any) -> Any:
        return original(output, input, op=dist.ReduceOp.SUM, **kwargs)

    def wrong_order(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(output, *args, **kwargs)
        output.copy_(output.flip(0))
        return result

    replacement = divides_nothing if name == "reduce_scatter_tensor" else wrong_order
    outcome = {}
    for average in (False, True):
        with mock.patch.object(dist, name, replacement) if group.rank() == 1 else nullcontext():
            try:
                check_collectives(group, average=average)
                outcome[str(average)] = ""
            except RuntimeError as error:
                outcome[str(average)] = str(error)
    return outcome


@pytest.mark.kind(35)
def test_a_back_end_that_does_not_average_is_refused_where_it_matters(ranks: RankPool) -> None:
    for rank, outcome in enumerate(ranks.run(_broken, NUM_RANKS, "reduce_scatter_tensor")):
        assert outcome["False"] == ""
        assert f"gloo backend of torch {torch.__version__}" in outcome["True"]
        assert "on ranks [1]" in outcome["True"]
        assert ("here: reduce_scatter_tensor(AVG)" in outcome["True"]) == (rank == 1)


def test_a_back_end_that_shuffles_bytes_is_refused(ranks: RankPool) -> None:
    for outcome in ranks.run(_broken, NUM_RANKS, "all_to_all_single"):
        assert "on ranks [1]" in outcome["False"]
        assert "on ranks [1]" in outcome["True"]


@pytest.mark.kind(35)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gloo_does_what_it_says(ranks: RankPool, size: int) -> None:
    assert ranks.run(_checked, size) == [None] * size


def _checked(group: dist.ProcessGroup) -> None:
    check_collectives(group, average=True)


def _with_sleeps(group: dist.ProcessGroup, seed: int | None) -> dict[str, list[Tensor]]:
    """Gradients and errors of 20 steps, each rank sleeping at random before its collectives."""
    from megatron_loco import patch

    case = Case(overlap=True, bucket_size=700)
    source = random.Random(f"{seed} {group.rank()}")
    original = dist.all_to_all_single

    def late(*args: Any, **kwargs: Any) -> Any:
        if seed is not None:
            time.sleep(source.choice((0.0, 0.0, 0.01, 0.03)))
        return original(*args, **kwargs)

    result: dict[str, list[Tensor]] = {"gradients": [], "errors": []}
    with ExitStack() as stack:
        parallel_megatron(stack)
        stack.enter_context(patch(LOCO))
        ddp = wrap(case)
        original = dist.all_to_all_single
        with mock.patch.object(dist, "all_to_all_single", late):
            for step in range(20):
                train_step(ddp, case, group.rank(), step)
                result["gradients"] += shards(ddp)
        for bucket_group in ddp.bucket_groups:
            for _, state in bucket_group.loco_states:
                result["errors"] += [state.error.codes.clone(), state.error.scales.clone()]
                result["traffic"] = [torch.tensor(list(vars(state.traffic).values()))]
    return result


@pytest.mark.kind(36)
def test_results_do_not_depend_on_timing(ranks: RankPool) -> None:
    punctual = ranks.run(_with_sleeps, NUM_RANKS, None)
    late = ranks.run(_with_sleeps, NUM_RANKS, 1)
    for mine, theirs in zip(late, punctual, strict=True):
        assert len(mine["gradients"]) == 40
        for name in mine:
            assert all(torch.equal(a, b) for a, b in zip(mine[name], theirs[name], strict=True)), name
    # What was sent is the same on all ranks of the group.
    assert all(torch.equal(one["traffic"][0], punctual[0]["traffic"][0]) for one in punctual)


def _replaced_afterwards(group: dist.ProcessGroup) -> str:
    case = Case()
    try:
        train_step(wrap(case), case, group.rank(), 0)
    except RuntimeError as error:
        return str(error)
    return ""


def _refused(group: dist.ProcessGroup) -> dict[str, str]:
    """Each setting on its own, given to megatron.core without a command line."""
    from megatron_loco import patch

    result = {}
    with ExitStack() as stack:
        parallel_megatron(stack)
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            FullyShardedDataParallel,
            TorchFullyShardedDataParallel,
        )
        from megatron.core.distributed import param_and_grad_buffer as buffers
        from megatron.core.transformer import TransformerConfig

        from megatron_loco.integrations.megatron.grad_sync import GradSync

        stack.enter_context(patch(LOCO))
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)

        def refused(wrapper: Any = DistributedDataParallel, mark: str = "", **settings: Any) -> str:
            module = Prescribed(torch.float32, False)
            for weight in module.weights if mark else ():
                setattr(weight, mark, True)
            ddp_config = DistributedDataParallelConfig(**{"use_distributed_optimizer": True, **settings})
            return _stopped_by(lambda: wrapper(config, ddp_config, module))

        result["use_distributed_optimizer"] = refused(use_distributed_optimizer=False)
        with mock.patch.object(buffers, "dist_reduce_scatter_func", buffers.dist_reduce_scatter_func):
            # Megatron's constructor replaces this global for good.
            result["reduce_scatter_with_fp32_accumulation"] = refused(reduce_scatter_with_fp32_accumulation=True)
            result["replaced afterwards"] = _replaced_afterwards(group)
        result["layer-wise"] = refused(mark="is_managed_by_layer_wise_optimizer")
        result["tensor_parallel_num_weight_shards"] = refused(mark="is_gtp_weight_remat")
        for name in ("nccl_ub", "reuse_grad_buf_for_mxfp8_param_ag"):
            # Neither can be constructed on a CPU.
            ddp = wrap(Case())
            setattr(ddp.ddp_config, name, True)
            result[name] = _stopped_by(lambda ddp=ddp: GradSync().attach(ddp, LOCO))
        config.cuda_graph_impl = "full_iteration"
        result["cuda_graph_impl"] = refused()
        result["FullyShardedDataParallel"] = refused(FullyShardedDataParallel)
        result["TorchFullyShardedDataParallel"] = refused(TorchFullyShardedDataParallel)
    return result


def test_what_does_not_work_is_refused_without_a_command_line_too(ranks: RankPool) -> None:
    for messages in ranks.run(_refused, NUM_RANKS):
        assert "reduced without it" in messages.pop("replaced afterwards")
        for name, message in messages.items():
            assert name in message
            assert "use" in message or "leave" in message


def _refused_on_one(group: dist.ProcessGroup) -> str:
    from megatron_loco.integrations.megatron.grad_sync import GradSync

    with ExitStack() as stack:
        parallel_megatron(stack)
        ddp = wrap(Case())
        ddp.ddp_config.nccl_ub = group.rank() == 1
        return _stopped_by(lambda: GradSync().attach(ddp, LOCO))


@pytest.mark.kind(21)
def test_a_refusal_on_one_rank_does_not_leave_the_others_waiting(ranks: RankPool) -> None:
    for message in ranks.run(_refused_on_one, NUM_RANKS):
        assert "NCCL user buffers" in message
        assert "on rank 1" in message


def _plain_processes(folder: Path, *flags: str) -> list[subprocess.Popen[bytes]]:
    """Two ranks that nobody looks after: torchrun's agent would end the one when the other is gone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [
        sys.executable,
        "-m",
        "tests.integrations.megatron._dying_entry",
        *_training.LOCO[1:],
        *_training.MODEL,
        *flags,
    ]
    return [
        subprocess.Popen(
            [*command, "--tensorboard-dir", str(folder / "tensorboard")],
            env={
                **os.environ,
                **{"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"},
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
            },
            # A file: the checkpoint writers of a killed rank outlive it, and would hold a pipe open.
            stdout=(folder / f"rank{rank}.txt").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for rank in range(2)
    ]


@pytest.mark.kind(21)
def test_a_rank_that_is_killed_ends_the_others_and_the_last_checkpoint_resumes(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    flags = ("--loco-bits", "4", "--loco-warmup-steps", "0", "--distributed-timeout-minutes", "1")
    saving = ("--save", saved, "--save-interval", "4", "--ckpt-format", "torch_dist")
    processes = _plain_processes(tmp_path, *flags, *saving, "--train-iters", "8")
    try:
        killed = processes[1].wait(timeout=_training.TIMEOUT_S)
        assert killed == -signal.SIGKILL, (tmp_path / "rank1.txt").read_text()[-6000:]
        # The timeout of the process group, and time to print what is wrong.
        other = processes[0].wait(timeout=60 + 30)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    output = (tmp_path / "rank0.txt").read_text()
    assert other > 0, output[-6000:]
    assert "Error" in output

    resumed = _training.launch(tmp_path / "resumed", *flags, "--load", saved)
    assert resumed.returncode == 0, resumed.stdout[-6000:]
    assert min(Run.read(tmp_path / "resumed").scalars["lm loss"]) == 5
