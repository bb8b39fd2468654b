"""Every supported release: LoCo's seams are what they are taken for, and reductions are the same on all of them."""

from __future__ import annotations

import pytest

from megatron_loco.integrations.megatron.releases import release_of
from megatron_loco.integrations.megatron.seams import Seams
from tests._releases import RELEASES
from tests.releases import _runs

BUFFER = "megatron.core.distributed.param_and_grad_buffer"


@pytest.mark.parametrize("version", RELEASES)
def test_seams_are_found_replaced_and_restored(version: str) -> None:
    run = _runs.runtime(version)
    assert run["version"] == version
    assert run["training"] == (version != "0.16.1")
    assert run["static"] == []
    patches = Seams().patches(release_of(version), training=run["training"])
    assert run["targets"] == sorted(patch.target for patch in patches if patch.kind == "wrap")
    assert run["replaced"] == run["targets"]
    assert run["restored"]
    # What a release is said not to have is not there: else a step that is repeated would count twice.
    assert run["absent"] == []
    assert run["initialize has validate_args"] == ("megatron.training.initialize:validate_args" in run["targets"])
    assert ("pass the settings" in run["without a config"]) == (not run["training"])


@pytest.mark.parametrize("version", RELEASES)
def test_modified_and_unknown_megatron_is_refused(version: str) -> None:
    run = _runs.runtime(version)
    first, nearest, *rest = run["modified"].split("\n")[1:]
    assert first.startswith(f"  {BUFFER}:_ParamAndGradBucketGroup.start_grad_sync: unknown source ")
    assert nearest.startswith(f"nearest known release: {release_of(version)} (")
    assert rest[0].startswith(f"  {BUFFER}:_ParamAndGradBucketGroup.start_grad_sync: ")
    assert "MEGATRON_LOCO_ALLOW_UNKNOWN_SOURCE=1" in rest[1]
    assert len(rest) == 2
    assert run["allowed"]
    assert run["unknown version"].startswith("megatron-core 0.20.0 is not supported (tested: 0.16, 0.17, 0.18, 0.19)")


@pytest.mark.parametrize("version", RELEASES[1:])
def test_refusals_can_be_looked_at_whatever_flags_a_release_has(version: str) -> None:
    assert _runs.runtime(version)["refusals"] == ["--use-distributed-optimizer"]


@pytest.mark.parametrize("version", RELEASES)
def test_overlap_with_several_instances_is_refused_where_stock_is_wrong(version: str) -> None:
    for error in _runs.runtime(version)["several instances"]:
        assert error.startswith("with several optimizer instances and overlap, Megatron 0.16") == (version == "0.16.1")
        assert version == "0.16.1" or not error


@pytest.mark.parametrize("version", RELEASES)
def test_off_and_identity_are_bitwise_stock(version: str) -> None:
    for digests in _runs.runtime(version)["reductions"]:
        for case in ("one bucket", "overlap"):
            assert digests[f"{case}, off"] == digests[f"{case}, stock"]
            assert digests[f"{case}, identity"] == digests[f"{case}, stock"]
            assert digests[f"{case}, 4 bits"] != digests[f"{case}, stock"]


@pytest.mark.parametrize("version", RELEASES)
def test_reductions_are_those_of_the_installed_release(version: str) -> None:
    # Shards and error, after three steps, of both ranks: what was sent is then the same as well.
    assert _runs.runtime(version)["reductions"] == _runs.runtime(RELEASES[-1])["reductions"]


@pytest.mark.parametrize("version", RELEASES)
def test_static_patch_is_bitwise_the_runtime_patch(version: str) -> None:
    run, runtime = _runs.static(version), _runs.runtime(version)
    definitions = {
        seam.target for seam in Seams().table if seam.is_in(release_of(version), training=runtime["training"])
    }
    assert run["version"] == version
    assert run["static"] == run["targets"] == sorted(definitions)
    for static_digests, digests in zip(run["reductions"], runtime["reductions"], strict=True):
        assert static_digests.items() <= digests.items()
        assert len(static_digests) == 6  # all but "off": there is no stock function without a decorator
    assert run["second"]
    assert "call remove() on its handle first" in run["conflict"]
    assert run["active"]
    assert run["inactive again"]


def test_partly_patched_megatron_is_refused() -> None:
    run = _runs.partly("0.16.1")
    for message in (run["by patch()"], run["by itself"]):
        assert message.split("\n") == [
            "this Megatron has LoCo's static patch in a part of its files; without a decorator are",
            "  megatron.core.rerun_state_machine:RerunStateMachine.should_checkpoint_and_exit",
            "  megatron.core.rerun_state_machine:RerunStateMachine.should_run_forward_backward",
            "see 'megatron-loco patch status PATH'; apply the patch to all of them, or revert it",
        ]
