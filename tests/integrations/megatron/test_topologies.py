"""Every way in which Megatron spreads a model over ranks: LoCo works there, and exactly where its codec is."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loco.config import LoCoConfig
from megatron_loco.launch.report import Run
from tests._ranks import RankPool
from tests.integrations.megatron import _training
from tests.integrations.megatron._ddp import Case, buckets, parallel_megatron, shards, train_step, wrap
from tests.integrations.megatron._gpt import Gpt, Training, megatron, training

IDENTITY = LoCoConfig(bits=32, warmup_steps=0, min_bucket_numel=0)
LOCO = LoCoConfig(bits=4, warmup_steps=0, reset_interval=0, min_bucket_numel=0)

NUM_RANKS = 4


@pytest.fixture
def ranks() -> Iterator[RankPool]:
    """Four ranks that have imported Megatron."""
    with RankPool(NUM_RANKS) as pool:
        yield pool


def _nothing(name: str) -> bool:
    return False


def _run(
    gpt: Gpt, loco: LoCoConfig | None, num_steps: int, is_frozen: Callable[[str], bool] = _nothing
) -> list[dict[str, Tensor]]:
    """Reduced gradients of each step."""
    with training(gpt, loco, is_frozen) as run:
        result = []
        for step in range(num_steps):
            run.step(step)
            result.append(run.gradients())
        return result


def _distance(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> float:
    # Largest difference of any parameter's gradient in any step, relative to the parameter's largest.
    distances = [0.0]
    for mine, theirs in zip(a, b, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            largest = theirs[name].abs().max().item()
            distances.append((mine[name] - theirs[name]).abs().max().item() / largest if largest else 0.0)
    return max(distances)


def _compare(group: dist.ProcessGroup, gpt: Gpt) -> dict[str, float]:
    with megatron(gpt):
        stock = _run(gpt, None, 3)
        loco = _run(gpt, LOCO, 3)
        other = _run(dataclasses.replace(gpt, overlap=not gpt.overlap), LOCO, 3)
        return {
            "identity": _distance(_run(gpt, IDENTITY, 3), stock),
            "loco": _distance(loco[:1], stock[:1]),
            "overlap": _distance(loco, other),
        }


PIPELINE = {
    "pipeline": Gpt(pipeline=2),
    "tied embeddings": Gpt(pipeline=2, tied=True, overlap=True),
    "virtual pipeline": Gpt(pipeline=2, virtual_pipeline=2, num_layers=4, num_micro_batches=4, overlap=True),
    "experts on the second stage only": Gpt(pipeline=2, num_experts=4, moe_layers=(0, 1), overlap=True),
    "experts, two ranks each": Gpt(pipeline=2, num_experts=4, expert_parallel=2),
    "two optimizer instances": Gpt(num_instances=2),
    "two optimizer instances with overlap": Gpt(num_instances=2, overlap=True),
    "two optimizer instances, averaging": Gpt(num_instances=2, overlap=True, average=True),
}


@pytest.mark.parametrize("gpt", PIPELINE.values(), ids=PIPELINE)
def test_identity_is_stock_and_overlap_changes_nothing(ranks: RankPool, gpt: Gpt) -> None:
    for distances in ranks.run(_compare, NUM_RANKS, gpt):
        # Groups of two: the order of a sum does not matter, three steps with Adam agree to the last bit.
        assert distances["identity"] == 0.0
        assert distances["overlap"] == 0.0
        # A code step is a seventh of the block's largest element: an element is off by at most half of that from each
        # of two ranks, relative to the largest of the sum, which may be smaller than that of one rank.
        assert 0.0 < distances["loco"] < 0.6


def _embeddings(group: dist.ProcessGroup, gpt: Gpt, num_steps: int) -> list[Tensor | None]:
    with megatron(gpt), training(gpt, LOCO) as run:
        result = []
        for step in range(num_steps):
            run.step(step)
            named = run.parameters()
            result.append(named.get("embedding.word_embeddings.weight", named.get("output_layer.weight")))
        return result


@pytest.mark.kind(12)
def test_tied_embeddings_stay_equal_on_both_stages(ranks: RankPool) -> None:
    first, *others = ranks.run(_embeddings, NUM_RANKS, Gpt(pipeline=2, tied=True, overlap=True), 20)
    for copies in others:
        for step, (mine, theirs) in enumerate(zip(copies, first, strict=True)):
            assert mine is not None
            assert theirs is not None
            assert torch.equal(mine, theirs), step
    assert not torch.equal(first[0], first[-1])


def _first_gradients(group: dist.ProcessGroup, gpt: Gpt, loco: LoCoConfig) -> dict[str, Tensor]:
    with megatron(gpt):
        return _run(gpt, loco, 1)[0]


@pytest.mark.kind(20)
@pytest.mark.parametrize("average", [False, True])
def test_expert_parallelism_does_not_change_the_gradients(ranks: RankPool, average: bool) -> None:
    # Experts reduced over four ranks, over two, and by one rank alone, with three different factors.
    merged = []
    for expert_parallel in (1, 2, 4):
        gpt = Gpt(num_experts=4, expert_parallel=expert_parallel, average=average, dtype=torch.float32)
        merged.append({k: v for one in ranks.run(_first_gradients, NUM_RANKS, gpt, IDENTITY) for k, v in one.items()})
    assert sum("local_experts" in name for name in merged[0]) == 2 * 4 * 2
    assert all(gradient.abs().max() > 0 for gradient in merged[0].values())
    for other in merged[1:]:
        # fp32 throughout, sums of some tens of terms in another order; a wrong factor would be 2 or 4.
        assert _distance([other], [merged[0]]) < 1e-6


def _frozen(name: str) -> bool:
    return "layers.0." in name or name.startswith("embedding")


def _all_but_norms(name: str) -> bool:
    return "norm" not in name


def _frozen_and_not(group: dist.ProcessGroup) -> dict[str, Any]:
    gpt = Gpt(pipeline=2, overlap=True)
    result: dict[str, Any] = {}
    with megatron(gpt):
        from megatron_loco import patch

        stock = _run(gpt, None, 3, _frozen)
        result["identity"] = _distance(_run(gpt, IDENTITY, 3, _frozen), stock)
        with patch(LOCO):
            run = Training(gpt, _frozen)
            before = run.parameters()
            for step in range(3):
                run.step(step)
            after = run.parameters()
            result["moved"] = {name for name in before if not torch.equal(before[name], after[name])}
            result["states"] = sum(state.layout.numel for state in _states(run))
            thawed = Training(gpt, _nothing)
            thawed.step(3)
            result["states when thawed"] = sum(state.layout.numel for state in _states(thawed))
    return result


def _states(run: Training) -> list[Any]:
    groups = [g for chunk in run.chunks for g in chunk.bucket_groups + chunk.expert_parallel_bucket_groups]
    return [state for group in groups for _, state in group.loco_states]


def _stages_differ(group: dist.ProcessGroup, gpt: Gpt, is_frozen: Callable[[str], bool]) -> bool:
    """What only some stages have must not make others wait, neither in a step nor in groups that come later."""
    with megatron(gpt), training(gpt, LOCO, is_frozen) as run:
        run.step(0)
        run.step(1)
        later = dist.new_group()
        dist.barrier(group=later)
        dist.destroy_process_group(later)
        return True


@pytest.mark.kind(21)
@pytest.mark.parametrize(
    ("gpt", "is_frozen"),
    [
        (Gpt(pipeline=2, grad_norm_skip_threshold=1e9), _frozen),
        (Gpt(pipeline=2, num_experts=4, moe_layers=(0, 1), grad_norm_skip_threshold=1e9), _nothing),
        (Gpt(pipeline=2, num_experts=4, expert_parallel=2, moe_layers=(0, 1), grad_norm_skip_threshold=1e9), _nothing),
    ],
    ids=["first stage frozen", "experts on the second stage", "experts of two ranks on the second stage"],
)
def test_stages_that_differ_do_not_wait_for_each_other(
    ranks: RankPool, gpt: Gpt, is_frozen: Callable[[str], bool]
) -> None:
    assert ranks.run(_stages_differ, NUM_RANKS, gpt, is_frozen) == [True] * NUM_RANKS


def _one_stage_only(group: dist.ProcessGroup) -> bool:
    """Nothing of ours reaches beyond a data-parallel group: the other stage does not even build a model."""
    gpt = Gpt(pipeline=2)
    with megatron(gpt):
        from megatron.core import parallel_state

        from megatron_loco import patch

        if parallel_state.get_pipeline_model_parallel_rank() == 1:
            with patch(dataclasses.replace(LOCO, topology="flat")):
                case = Case()
                ddp = wrap(case)
                for step in range(2):
                    train_step(ddp, case, group.rank(), step)
            return True
        return False


def test_a_model_of_one_stage_concerns_no_other(ranks: RankPool) -> None:
    assert ranks.run(_one_stage_only, NUM_RANKS) == [False, False, True, True]


def _counters(group: dist.ProcessGroup, topology: str) -> list[dict[str, float]]:
    case = Case(overlap=True, expert_parallel=2)
    with ExitStack() as stack:
        parallel_megatron(stack, 2)
        from megatron_loco import patch

        stack.enter_context(patch(dataclasses.replace(LOCO, topology=topology, ranks_per_node=2, warmup_steps=1)))
        ddp = wrap(case)
        for step in range(3):
            train_step(ddp, case, group.rank(), step)
        groups = dict.fromkeys(group for group, _ in buckets(ddp))
        return [dict(vars(state.traffic)) for group in groups for _, state in group.loco_states]


@pytest.mark.parametrize("topology", ["flat", "two-level"])
def test_counters_are_the_same_on_all_ranks(ranks: RankPool, topology: str) -> None:
    first, *others = ranks.run(_counters, NUM_RANKS, topology)
    assert len(first) == 2
    assert all((counters["compressed_steps"], counters["exact_steps"]) == (2, 1) for counters in first)
    # The dense bucket over two nodes of two ranks; that of the experts over one rank of each node, flat in any case.
    assert [counters["inner_bytes"] > 0 for counters in first] == [topology == "two-level", False]
    assert all(counters["internode_bytes"] > 0 for counters in first)
    assert all(other == first for other in others)


@pytest.mark.kind(28)
@pytest.mark.kind(21, 28)
def test_a_stage_that_is_wholly_frozen(ranks: RankPool) -> None:
    for rank, result in enumerate(ranks.run(_frozen_and_not, NUM_RANKS)):
        assert result["identity"] == 0.0
        if rank < 2:
            assert (result["moved"], result["states"]) == (set(), 0)
        else:
            assert len(result["moved"]) == 8
            assert not any(_frozen(name) for name in result["moved"])
            assert result["states"] > 0
        assert result["states when thawed"] > 0


def _adapters_only(group: dist.ProcessGroup) -> dict[str, Any]:
    # 32 x 5 gradient elements: far below the default of --loco-min-bucket-numel.
    gpt = Gpt(overlap=True)
    with megatron(gpt):
        from megatron_loco import patch
        from megatron_loco.integrations.megatron import grad_sync

        stock = _run(gpt, None, 2, _all_but_norms)
        syncs: list[Any] = []
        original = grad_sync.GradSync.attach

        def attach(self: Any, *args: Any) -> None:
            syncs.append(self)
            original(self, *args)

        with mock.patch.object(grad_sync.GradSync, "attach", attach), patch(LoCoConfig(bits=4, warmup_steps=0)):
            run = Training(gpt, _all_but_norms)
            gradients = []
            for step in range(2):
                run.step(step)
                gradients.append(run.gradients())
        (bucket,) = (b for g in run.chunks[0].bucket_groups for b in g.buckets)
        return {
            "distance": _distance(gradients, stock),
            "states": len(_states(run)),
            "numel": bucket.grad_data.numel(),
            "traffic": syncs[0].stock_traffic,
        }


@pytest.mark.kind(28)
def test_adapters_reduce_exactly_and_their_bytes_are_counted(ranks: RankPool) -> None:
    for result in ranks.run(_adapters_only, NUM_RANKS):
        assert result["distance"] == 0.0
        assert result["states"] == 0
        # Two steps, each a ring reduce-scatter in fp32 over four ranks.
        assert result["traffic"].sent_bytes == 2 * result["numel"] * 4 * 3 / 4
        assert result["traffic"].bf16_bytes == result["traffic"].sent_bytes / 2


def _unused(group: dist.ProcessGroup, overlap: bool) -> dict[str, Any]:
    """The second matrix is unused by everybody in step 1, and by rank 1 alone in step 2; the third has no gradient at
    all but in its first row."""
    case = Case(overlap=overlap, multiple_of=NUM_RANKS)
    result: dict[str, Any] = {}
    with ExitStack() as stack:
        parallel_megatron(stack)
        from megatron_loco import patch

        def poison(coefficients: list[Any]) -> None:
            coefficients[4][1:] = 0
            if step == 1 or (step == 2 and group.rank() == 1):
                coefficients[2] = None

        for name, config in (("stock", None), ("identity", IDENTITY), ("loco", LOCO)):
            with patch(config) if config else nullcontext():
                ddp = wrap(case)
                try:
                    for step in range(4):
                        train_step(ddp, case, group.rank(), step, poison=poison)
                        result[f"{name} {step}"] = shards(ddp)
                        start, stop = _place(ddp, ddp.module.weights[4])
                        result[f"never {name} {step}"] = _whole(ddp)[start:stop].view(case.shapes[4])[1:].abs().max()
                except AssertionError as error:
                    result[f"{name} message"] = str(error)
    return result


def _place(ddp: Any, param: Any) -> tuple[int, int]:
    ((start, stop),) = (bucket.param_to_index[param] for _, bucket in buckets(ddp) if param in bucket.param_to_index)
    return start, stop


def _whole(ddp: Any) -> Tensor:
    # The only bucket, all shards of it.
    whole = torch.empty_like(buckets(ddp)[0][1].grad_data)
    dist.all_gather_into_tensor(whole, shards(ddp)[0])
    return whole


@pytest.mark.kind(29)
def test_parameters_that_are_not_always_used(ranks: RankPool) -> None:
    for result in ranks.run(_unused, NUM_RANKS, False):
        for step in range(4):
            assert torch.equal(result[f"identity {step}"][0], result[f"stock {step}"][0])
            assert not torch.equal(result[f"loco {step}"][0], result[f"stock {step}"][0])
            # Zero is a code: what never had a gradient gets none from its neighbours in the block, and no residue.
            assert result[f"never loco {step}"] == 0


@pytest.mark.kind(29)
def test_overlap_still_says_that_a_parameter_had_no_gradient(ranks: RankPool) -> None:
    for result in ranks.run(_unused, NUM_RANKS, True):
        for name in ("stock", "identity", "loco"):
            assert "Communication call has not been issued" in result[f"{name} message"]
            assert f"{name} 0" in result
            assert f"{name} 1" not in result


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [(2, ("--mtp-num-layers", "1")), (4, ("--num-distributed-optimizer-instances", "2", "--overlap-grad-reduce"))],
    ids=["multi-token prediction", "two optimizer instances"],
)
def test_in_the_training_loop(tmp_path: Path, num_ranks: int, flags: tuple[str, ...]) -> None:
    def run(name: str, *loco: str, entry: tuple[str, ...] = _training.LOCO) -> Run:
        return _training.train(tmp_path / name, *flags, *loco, entry=entry, num_ranks=num_ranks, iterations=4)

    stock = run("stock", entry=_training.STOCK)
    exact = ("--loco-warmup-steps", "0")
    # Two ranks per reduction, hence bitwise, the wire figures of LoCo apart.
    assert _training.differences(run("identity", "--loco-bits", "32", *exact), stock) == []
    loco = run("loco", "--loco-bits", "4", *exact)
    losses, stock_losses = loco.scalars["lm loss"], stock.scalars["lm loss"]
    assert losses[1] == stock_losses[1]
    assert losses[4] != stock_losses[4]
    # Four steps reduce the loss by 0.35 or more; the codec takes at most a tenth of that.
    assert stock_losses[1] - stock_losses[4] > 0.3
    assert abs(losses[4] - stock_losses[4]) < 0.03


def test_the_table_of_topologies() -> None:
    output = subprocess.run(
        [sys.executable, "-m", "megatron_loco.bench.topology", "--ranks", "2", "--json"], capture_output=True, text=True
    )
    assert output.returncode == 0, output.stderr
    rows = json.loads(output.stdout)["rows"]
    assert len(rows) == 2 * 6
    for row in rows:
        assert row["deviation_whole"] == 0.0
        # Two ranks: one addition, no order.
        assert row["deviation_random_ulps"] == 0.0
        assert row["counters_are_right"]
        # 4 bits, a scale of 32 per block of 256, and some partial blocks and exact parameters.
        assert 0.5 + 4 / 256 < row["bytes_per_element"] < 0.54
        assert row["exact_bytes_beside"] == 0.0
