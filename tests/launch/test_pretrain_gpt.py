"""What our own training script refuses; that it trains, on every release: tests/releases and tests/integrations."""

from __future__ import annotations

from argparse import Namespace

import pytest

pretrain_gpt = pytest.importorskip("megatron_loco.launch.pretrain_gpt")


def arguments(**more: object) -> Namespace:
    """Parsed arguments of a release; not every release has all of those that are looked at."""
    return Namespace(**{"context_parallel_size": 1, "hybrid_layer_pattern": None, "sft": False, "spec": None, **more})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"sft": True}, "--sft"),
        ({"fim_data": True}, "--fim-data"),
        ({"logits_load_dir": "somewhere", "sft": True}, "--sft, --logits-load-dir"),
        ({"per_dataset_sequences_path": "a.json"}, "--per-dataset-sequences-path"),
        ({"context_parallel_size": 2}, "--context-parallel-size > 1"),
    ],
)
def test_what_only_the_script_of_a_checkout_does(settings: dict[str, object], named: str) -> None:
    pretrain_gpt.refuse(arguments())
    with pytest.raises(ValueError, match=f"^{named}: set MEGATRON_LM_DIR to a Megatron-LM checkout"):
        pretrain_gpt.refuse(arguments(**settings))


def test_hybrid_model_needs_another_script() -> None:
    with pytest.raises(ValueError, match=r"MEGATRON_LM_DIR .* run\.script to pretrain_hybrid\.py"):
        pretrain_gpt.refuse(arguments(hybrid_layer_pattern="*-"))


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"spec": ["module", "name"]}, "--spec"), ({"use_legacy_models": True}, "--use-legacy-models")],
)
def test_models_that_only_newer_releases_build(
    settings: dict[str, object], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrain_gpt.releases, "RELEASE", (0, 19))
    pretrain_gpt.refuse(arguments(**settings))
    monkeypatch.setattr(pretrain_gpt.releases, "RELEASE", (0, 18))
    with pytest.raises(ValueError, match=f"^{named}: set MEGATRON_LM_DIR"):
        pretrain_gpt.refuse(arguments(**settings))
