"""What differs between Megatron releases, where no real release is needed to see it."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_loco.integrations.megatron.differences import captures_whole_step
from megatron_loco.integrations.megatron.releases import is_older, release_of, supported_release
from megatron_loco.patching import SeamError


class _Scope(enum.Enum):
    full_iteration = 1
    attn = 2


@pytest.mark.parametrize(
    ("settings", "whole"),
    [
        ({"cuda_graph_impl": "full_iteration"}, True),
        ({"cuda_graph_impl": "local"}, False),
        ({"cuda_graph_impl": "none", "cuda_graph_scope": None}, False),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": [_Scope.attn, _Scope.full_iteration]}, True),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": _Scope.full_iteration}, True),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}, True),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": [_Scope.attn]}, False),
    ],
)
def test_graphs_of_a_whole_step(settings: dict[str, Any], whole: bool) -> None:
    assert captures_whole_step(SimpleNamespace(**settings)) == whole


def test_versions() -> None:
    assert release_of("0.18.2+0a1b2c3") == "0.18"
    assert is_older("0.9", "0.16")
    assert not is_older("0.17", "0.17")
    assert supported_release("0.17.0rc0", allow_unknown=False) == "0.17"
    with pytest.raises(SeamError, match=r"0\.15\.3 is not supported \(tested: 0\.16, 0\.17, 0\.18, 0\.19\)"):
        supported_release("0.15.3", allow_unknown=False)
    allowed = {version: supported_release(version, allow_unknown=True) for version in ("0.15.3", "0.20.1", "1.0", "1")}
    assert allowed == {"0.15.3": "0.16", "0.20.1": "0.19", "1.0": "0.19", "1": "0.19"}
