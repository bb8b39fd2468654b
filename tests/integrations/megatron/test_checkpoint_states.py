"""Saved and loaded bucket states, with Megatron's real optimizer and checkpoint functions, over layouts and formats."""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_loco.config import LoCoConfig
from megatron_loco.integrations.megatron.checkpoint import Checkpoints
from tests._ranks import RankPool
from tests.integrations.megatron._checkpoints import ITERATION, Saver, damage, flags, load, snapshot, states
from tests.integrations.megatron._gpt import Gpt, Training, megatron, training

WORLD_SIZE = 4
LOCO = LoCoConfig(bits=4, block_size=32, warmup_steps=1, min_bucket_numel=0)
IDENTITY = LoCoConfig(bits=32, block_size=32, warmup_steps=1, min_bucket_numel=0)
DENSE = Gpt()
EXPERTS = Gpt(expert_parallel=2, num_experts=4, overlap=True)
FULLY_RESHARDABLE = {"dist_ckpt_optim_fully_reshardable": True}

GOES_ON = "LoCo: goes on with the error state of the checkpoint, at step 3"
AT_ZERO = "LoCo: zero error, and step 3 of its own counter: "
ANEW = "LoCo: zero error, and step 0 of its own counter (the next 1 steps are exact): "
WITHOUT_OPTIMIZER = ANEW + "the optimizer state is not loaded (--finetune, --no-load-optim, or not saved)"
FLAG = "pass --loco-load-error never to go on with zero error; weights and optimizer state are not concerned"
_ENTRY = "megatron_loco.integrations.megatron.checkpoint_entry"


def _loco(**changes: Any) -> LoCoConfig:
    return dataclasses.replace(LOCO, **changes)


@dataclass(frozen=True)
class Run:
    """A model, settings (``None``: stock Megatron, no patches) and Megatron flags."""

    gpt: Gpt = DENSE
    loco: LoCoConfig | None = LOCO
    flags: Mapping[str, Any] = field(default_factory=dict)
    with_optimizer: bool = True
    damaged: Mapping[str, str] = field(default_factory=dict)
    """What happens to the files before this run reads them."""
    mocked: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What a rank found after a load."""

    had_error: bool
    """Whether there was an error to save."""
    loaded: bool = False
    """Everything equals what it was at the save, bit for bit."""
    continued: bool = False
    """And two steps later what it was there after two more steps."""
    step: int = -1
    error_is_zero: bool = False
    messages: list[str] = field(default_factory=list)
    failure: str = ""


@pytest.fixture
def pool() -> Iterator[RankPool]:
    with RankPool(WORLD_SIZE) as ranks:
        yield ranks


def _resume(group: Any, folder: Path, before: Run, afters: Sequence[Run]) -> list[Outcome]:
    """Three steps, a checkpoint, two steps; and for each of ``afters`` a fresh model, the checkpoint, two steps."""
    warnings.simplefilter("ignore")
    outcomes = []
    with ExitStack() as groups:
        groups.enter_context(megatron(before.gpt))
        with training(before.gpt, before.loco) as t:
            _steps(t, 0, ITERATION)
            for state in states(t):
                state.unit.fill_(0.75)  # as a loss scale would
            Saver(t, flags(**before.flags)).save(folder / "saved")
            saved, had_error = snapshot(t), not _is_zero(t)
            _steps(t, ITERATION, 2)
            straight = snapshot(t)
        current = before.gpt
        for number, after in enumerate(afters):
            if after.gpt != current:
                groups.close()
                groups.enter_context(megatron(after.gpt))
                current = after.gpt
            source = _damaged_copy(folder, number, after.damaged)
            outcome = Outcome(had_error)
            outcomes.append(outcome)
            with training(after.gpt, after.loco) as t, ExitStack() as mocks:
                for name, value in after.mocked.items():
                    mocks.enter_context(mock.patch(f"{_ENTRY}.{name}", value))
                try:
                    outcome.messages = load(t, source, flags(**after.flags), with_optimizer=after.with_optimizer)
                except BaseException as error:
                    outcome.failure = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
                outcome.error_is_zero = _is_zero(t)
                if outcome.failure:
                    continue
                outcome.loaded = _same(saved, snapshot(t))
                (outcome.step,) = {state.step for state in states(t)}
                _steps(t, ITERATION, 2)
                assert {state.step for state in states(t)} == {outcome.step + 2}
                outcome.continued = _same(straight, snapshot(t))
    return outcomes


def _damaged_copy(folder: Path, number: int, damaged: Mapping[str, str]) -> Path:
    source = folder / "saved"
    if damaged:
        source = folder / f"damaged {number}"
        if dist.get_rank() == 0:
            shutil.copytree(folder / "saved", source)
            for key, how in damaged.items():
                damage(source / f"iter_{ITERATION:07d}", key, how)
        dist.barrier()
    return source


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True)
    )


def _is_zero(t: Training) -> bool:
    return not any(tensor.any() for state in states(t) for tensor in state.error.tensors().values())


def _steps(t: Training, first: int, number: int) -> None:
    for step in range(first, first + number):
        t.step(step)


def _run(pool: RankPool, folder: Path, before: Run, *afters: Run) -> list[list[Outcome]]:
    """Outcomes of each of ``afters``, per rank."""
    per_rank = pool.run(_resume, WORLD_SIZE, folder, before, afters)
    return [list(outcomes) for outcomes in zip(*per_rank, strict=True)]


@pytest.mark.kind(27)
@pytest.mark.parametrize(
    "run",
    [
        pytest.param(Run(EXPERTS), id="experts"),
        pytest.param(
            Run(EXPERTS, flags={**FULLY_RESHARDABLE, "ckpt_fully_parallel_load": True}), id="experts, fully reshardable"
        ),
        pytest.param(
            Run(Gpt(pipeline=2, virtual_pipeline=2, num_layers=4, overlap=True), flags={"ckpt_fully_parallel_save": 0}),
            id="interleaved pipeline, saved by the first ranks",
        ),
        pytest.param(Run(Gpt(num_instances=2), flags=FULLY_RESHARDABLE), id="two optimizer instances"),
        pytest.param(Run(loco=_loco(topology="two-level", ranks_per_node=2)), id="two levels, two nodes"),
        pytest.param(
            Run(loco=_loco(error_bits=16, rollback="restore"), flags={"dist_ckpt_strictness": "raise_all"}),
            id="16 bits, strict",
        ),
        pytest.param(
            Run(
                loco=_loco(error_bits=32),
                flags={"ckpt_fully_parallel_load": True, "ckpt_fully_parallel_load_exchange_algo": "gather_object"},
            ),
            id="32 bits, gathered objects",
        ),
    ],
)
def test_same_layout_continues_bit_for_bit(pool: RankPool, tmp_path: Path, run: Run) -> None:
    (outcomes,) = _run(pool, tmp_path, run, run)
    for outcome in outcomes:
        assert outcome.failure == ""
        assert outcome.had_error
        assert outcome.loaded
        assert outcome.continued
    assert [outcome.messages for outcome in outcomes] == [[GOES_ON], [], [], []]


@pytest.mark.parametrize("loco", [_loco(error_bits=0), _loco(warmup_steps=5)], ids=["0 bits", "warm-up"])
def test_counters_without_an_error(pool: RankPool, tmp_path: Path, loco: LoCoConfig) -> None:
    (outcomes,) = _run(pool, tmp_path, Run(loco=loco), Run(loco=loco))
    for outcome in outcomes:
        assert outcome.failure == ""
        assert not outcome.had_error
        assert outcome.loaded
        assert outcome.continued
    assert outcomes[0].messages == [GOES_ON]


def test_settings_that_may_change(pool: RankPool, tmp_path: Path) -> None:
    changed = _loco(bits=8, beta=0.5, reset_interval=100, warmup_steps=0)
    (outcomes,) = _run(pool, tmp_path, Run(), Run(loco=changed))
    assert all(outcome.loaded and not outcome.continued for outcome in outcomes)
    assert [outcome.messages for outcome in outcomes] == [
        [
            GOES_ON,
            "LoCo: the error state of the checkpoint is from other settings: --loco-bits 4 -> 8, --loco-beta 0.8 -> "
            "0.5, --loco-reset-interval 512 -> 100, --loco-warmup-steps 1 -> 0",
        ],
        [],
        [],
        [],
    ]


def _of_another_rank(model: Any) -> list[Any]:
    return [dist.get_rank() == 2]


@pytest.mark.kind(6)
@pytest.mark.parametrize(
    ("before", "expected"),
    [
        pytest.param(
            Run(flags=FULLY_RESHARDABLE),
            [
                (Run(loco=_loco(block_size=64)), "another layout (--loco-block-size 32 -> 64)"),
                (
                    Run(loco=_loco(error_bits=16, topology="two-level", ranks_per_node=2)),
                    "another layout (--loco-error-bits 8 -> 16, --loco-topology auto -> two-level, "
                    "--loco-ranks-per-node 0 -> 2)",
                ),
                (Run(loco=IDENTITY), "another layout (--loco-bits 4 -> 32)"),
                (
                    Run(mocked={"_meaning": _of_another_rank}),
                    "another layout (order of ranks, scale of gradients, or names, sizes or order of parameters)",
                ),
                # The same buckets, but their gradients are not divided by the number of ranks.
                (
                    Run(Gpt(average=True)),
                    "another layout (order of ranks, scale of gradients, or names, sizes or order of parameters)",
                ),
                (Run(mocked={"FORMAT": 7}), "the checkpoint's entry has format 1 (megatron_loco "),
                (Run(loco=_loco(load_error="never")), "--loco-load-error never"),
                (
                    Run(Gpt(pipeline=2)),
                    "another layout (pipeline parallel size 1 -> 2, data parallel size 4 -> 2)",
                ),
            ],
            id="LoCo",
        ),
        pytest.param(
            Run(loco=_loco(save_error="never")),
            [(Run(), "the checkpoint was written with --loco-save-error never")],
            id="no error saved",
        ),
    ],
)
def test_another_layout_starts_at_zero(
    pool: RankPool, tmp_path: Path, before: Run, expected: list[tuple[Run, str]]
) -> None:
    for outcomes, (_, why) in zip(_run(pool, tmp_path, before, *(run for run, _ in expected)), expected, strict=True):
        for outcome in outcomes:
            assert outcome.failure == ""
            assert outcome.had_error
            assert outcome.error_is_zero
            assert outcome.step == 3
        (message,) = outcomes[0].messages
        assert message.startswith(AT_ZERO)
        assert why in message
        assert [outcome.messages for outcome in outcomes[1:]] == [[], [], []]


def test_warm_up_goes_on_where_it_was(pool: RankPool, tmp_path: Path) -> None:
    (outcomes,) = _run(pool, tmp_path, Run(loco=IDENTITY), Run(loco=_loco(warmup_steps=5)))
    assert outcomes[0].messages == [
        "LoCo: zero error, and step 3 of its own counter (the next 2 steps are exact): the checkpoint has another "
        "layout (--loco-bits 32 -> 4)"
    ]
    assert all(outcome.error_is_zero and outcome.step == 3 for outcome in outcomes)


@pytest.mark.kind(5)
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        pytest.param(
            Run(loco=None), Run(), f"{ANEW}the checkpoint was written without LoCo", id="written by a stock run"
        ),
        pytest.param(Run(), Run(with_optimizer=False), WITHOUT_OPTIMIZER, id="optimizer not loaded"),
        pytest.param(
            Run(flags={"no_save_optim": True}), Run(with_optimizer=False), WITHOUT_OPTIMIZER, id="optimizer not saved"
        ),
    ],
)
def test_without_an_entry_everything_is_new(
    pool: RankPool, tmp_path: Path, before: Run, after: Run, message: str
) -> None:
    (outcomes,) = _run(pool, tmp_path, before, after)
    for outcome in outcomes:
        assert outcome.failure == ""
        assert outcome.error_is_zero
        assert outcome.step == 0
    assert [outcome.messages for outcome in outcomes] == [[message], [], [], []]


def test_changed_bytes_stop_every_rank(pool: RankPool, tmp_path: Path) -> None:
    cases = {
        "loco.rank_2.bucket_0.codes": "rank 2: dense bucket 0 (codes)",
        "loco.rank_0.bucket_1.scales": "rank 0: expert bucket 0 (scales)",
        # In the middle of the table: its second row.
        "loco.rank_3.counters": "rank 3: expert bucket 0 (counters)",
    }
    parallel_load = {"ckpt_fully_parallel_load": True}
    afters = [Run(EXPERTS, flags=parallel_load, damaged={key: "flip"}) for key in cases]
    afters.append(Run(EXPERTS, _loco(load_error="never"), damaged=dict.fromkeys(cases, "flip")))
    *stopped, goes_on = _run(pool, tmp_path, Run(EXPERTS), *afters)
    for outcomes, named in zip(stopped, cases.values(), strict=True):
        for outcome in outcomes:
            assert outcome.failure == (
                f"ValueError: LoCo: the error state of the checkpoint is damaged, checksums differ ({named}); {FLAG}"
            )
            assert outcome.error_is_zero
    for outcome in goes_on:
        assert (outcome.failure, outcome.step) == ("", 3)


def test_what_cannot_be_read_says_how_to_go_on(pool: RankPool, tmp_path: Path) -> None:
    # On all ranks, since a rank that fails alone leaves the others waiting, here as in a stock run.
    wiped = {f"loco.rank_{rank}.bucket_0.codes": "wipe" for rank in range(WORLD_SIZE)}
    stopped, goes_on = _run(
        pool, tmp_path, Run(), Run(damaged=wiped), Run(loco=_loco(load_error="never"), damaged=wiped)
    )
    for outcome in stopped:
        assert outcome.failure.startswith("CheckpointException")
        assert outcome.failure.endswith(f"LoCo: if what cannot be read is an entry 'loco.rank_...', {FLAG}")
    for outcome in goes_on:
        assert (outcome.failure, outcome.step) == ("", 3)


def test_strictness_that_no_other_layout_can_satisfy(pool: RankPool, tmp_path: Path) -> None:
    strict = Run(loco=_loco(block_size=64), flags={"dist_ckpt_strictness": "raise_all"})
    (outcomes,) = _run(pool, tmp_path, Run(), strict)
    for outcome in outcomes:
        assert outcome.failure.startswith("CheckpointingException: Some keys found in the checkpoint are missing")
        assert outcome.failure.endswith(
            "LoCo: entries 'loco.rank_...' are not asked for (the checkpoint has another layout (--loco-block-size 32 "
            "-> 64)), which --dist-ckpt-strictness raise_all does not accept"
        )


def _stock_runs(group: Any, folder: Path) -> dict[str, bool]:
    """A checkpoint with LoCo's entries and one without, of the same weights, in stock runs."""
    warnings.simplefilter("ignore")
    from megatron_loco import patch

    with megatron(EXPERTS):
        with training(EXPERTS, LOCO) as t:
            _steps(t, 0, ITERATION)
            Saver(t, flags()).save(folder / "loco")
        Saver(t, flags()).save(folder / "stock")  # the patches are gone
        ends = []
        for source, patched in (("stock", False), ("loco", False), ("loco", True)):
            with training(EXPERTS, None) as t:
                if patched:
                    with patch():
                        load(t, folder / source, flags())
                else:
                    load(t, folder / source, flags())
                _steps(t, ITERATION, 2)
                ends.append(snapshot(t))
    return {"unpatched": _same(ends[0], ends[1]), "LoCo off": _same(ends[0], ends[2])}


@pytest.mark.kind(5)
def test_stock_runs_load_it_as_their_own(pool: RankPool, tmp_path: Path) -> None:
    for outcome in pool.run(_stock_runs, WORLD_SIZE, tmp_path):
        assert outcome == {"unpatched": True, "LoCo off": True}


def _saves_of_one_run(group: Any, folder: Path) -> dict[str, bool]:
    """An asynchronous writer that comes late, and Megatron's cache of the structure over two saves."""
    warnings.simplefilter("ignore")
    result = {}
    constant = flags(ckpt_assume_constant_structure=True)
    with megatron(DENSE):
        with training(DENSE, LOCO) as t:
            _steps(t, 0, ITERATION)
            finish = Saver(t, flags(async_save=True)).save(folder / "late")
            at_save = _errors(t)
            _steps(t, ITERATION, 2)
            result["errors moved on"] = not _same(at_save, _errors(t))
            finish()
            saver = Saver(t, constant)
            saver.save(folder / "constant", 5)
            _steps(t, 5, 1)
            saver.save(folder / "constant", 6)
            at_second_save = snapshot(t)
        with training(DENSE, LOCO) as t:
            load(t, folder / "late", flags())
            result["late"] = _same(_errors(t), at_save)
        with training(DENSE, LOCO) as t:
            load(t, folder / "constant", constant)
            result["constant"] = _same(snapshot(t), at_second_save)
    return result


def _errors(t: Training) -> list[Any]:
    return [x for s in states(t) for x in (s.step, *(tensor.clone() for tensor in s.error.tensors().values()))]


def test_saves_of_one_run(pool: RankPool, tmp_path: Path) -> None:
    for result in pool.run(_saves_of_one_run, WORLD_SIZE, tmp_path):
        assert result == {"errors moved on": True, "late": True, "constant": True}


@pytest.mark.parametrize(
    ("loco", "changed", "reason"),
    [
        (LOCO, {}, None),
        (LOCO, {"save": None, "ckpt_format": "torch"}, None),
        (_loco(save_error="never"), {}, "--loco-save-error never"),
        (LOCO, {"no_save_optim": True}, "--no-save-optim"),
        (LOCO, {"ckpt_format": "torch"}, "--ckpt-format torch; torch_dist would"),
        (None, {"ckpt_format": "torch"}, None),
    ],
)
def test_said_at_the_start(
    caplog: pytest.LogCaptureFixture, loco: LoCoConfig | None, changed: dict[str, Any], reason: str | None
) -> None:
    checkpoints = Checkpoints(lambda: loco)
    args = flags(**{"save": "somewhere", **changed})
    with (
        mock.patch("megatron.training.global_vars.get_args", return_value=args),
        mock.patch.object(dist, "get_rank", int),
    ):
        checkpoints.announce(loco)
        checkpoints.announce(loco)  # a second model chunk
    expected = [f"LoCo: checkpoints of this run do not hold the error state ({reason})"] if reason else []
    assert [record.getMessage() for record in caplog.records if record.name.startswith("megatron_loco")] == expected
