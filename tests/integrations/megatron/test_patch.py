"""Installing LoCo in Megatron, and removing it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_loco import LoCoConfig, cpu, patch
from megatron_loco.integrations.megatron.releases import ALLOW_VARIABLE
from megatron_loco.integrations.megatron.seams import Seams
from megatron_loco.patching import SeamError


@pytest.fixture(scope="module", autouse=True)
def _runtime() -> Iterator[None]:
    with cpu.enter():
        yield


def _current() -> dict[str, Any]:
    found = {}
    for seam in Seams().patches("0.19", training=True):
        module, _, path = seam.target.partition(":")
        value: Any = importlib.import_module(module)
        for name in path.split("."):
            value = vars(value)[name]
        found[seam.target] = value
    return found


def test_every_seam_is_replaced_and_restored() -> None:
    before = _current()
    with patch() as handle:
        during = _current()
        assert {t for t in before if during[t] is not before[t]} == {*handle.targets}
        only_checked = sorted(target.rpartition(":")[2] for target in before.keys() - {*handle.targets})
        assert only_checked == ["_ParamAndGradBucket.__init__", "_ParamAndGradBucketGroup.finish_grad_sync"]
    assert _current() == before


def test_second_call_returns_the_same_handle() -> None:
    with patch() as handle:
        assert patch() is handle
        with pytest.raises(RuntimeError, match="installed with None"):
            patch(LoCoConfig(bits=4))
    with patch(LoCoConfig(bits=4)) as other:
        assert other is not handle


def test_modified_megatron_is_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    def start_grad_sync(self: Any, force_all_reduce: bool = False) -> None:
        """Somebody's local change."""

    monkeypatch.setattr(_ParamAndGradBucketGroup, "start_grad_sync", start_grad_sync)
    before = _current()
    with pytest.raises(SeamError, match=r"start_grad_sync: unknown source") as caught:
        patch()
    assert "nearest known release: 0.19 (12 of 13" in str(caught.value)
    assert ALLOW_VARIABLE in str(caught.value)
    assert _current() == before
    with patch(allow_unknown_source=True):
        pass
    monkeypatch.setenv(ALLOW_VARIABLE, "1")
    with patch():
        pass
    with pytest.raises(SeamError, match="unknown source"):
        patch(allow_unknown_source=False)
    monkeypatch.setenv(ALLOW_VARIABLE, "yes")
    with pytest.raises(ValueError, match=f"{ALLOW_VARIABLE} must be 0 or 1, got 'yes'"):
        patch()


@pytest.mark.parametrize("version", ["0.15.3", "0.20.0"])
def test_other_release_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("megatron.core.__version__", version)
    with pytest.raises(SeamError, match=rf"megatron-core {version} is not supported"):
        patch()


def test_missing_megatron_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(SeamError, match="megatron-core cannot be imported"):
        patch()
