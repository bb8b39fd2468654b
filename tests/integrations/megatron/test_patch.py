"""Installing LoCo in Megatron, and removing it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest

from megatron_loco import LoCoConfig, cpu, patch
from megatron_loco.integrations.megatron.seams import seam_patches
from megatron_loco.patching import SeamError


@pytest.fixture(scope="module", autouse=True)
def _runtime() -> Iterator[None]:
    with cpu.enter():
        yield


def _current() -> dict[str, Any]:
    found = {}
    for seam in seam_patches(None):
        module, _, path = seam.target.partition(":")
        value: Any = importlib.import_module(module)
        for name in path.split("."):
            value = vars(value)[name]
        found[seam.target] = value
    return found


def test_every_seam_is_replaced_and_restored() -> None:
    before = _current()
    with patch():
        during = _current()
        assert [t for t in before if during[t] is before[t]] == []
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
    with pytest.raises(SeamError, match=r"start_grad_sync: unknown source"):
        patch()
    assert _current() == before
    with patch(allow_unknown_source=True):
        pass


@pytest.mark.parametrize("installed", ["0.18.2", "0.20.0"])
def test_other_release_is_refused(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr("megatron_loco.integrations.megatron.seams.version", lambda name: installed)
    with pytest.raises(SeamError, match=rf"megatron-core {installed} is not supported"):
        patch()


def test_missing_megatron_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("megatron_loco.integrations.megatron.seams.version", not_found)
    monkeypatch.setitem(__import__("sys").modules, "megatron.core", None)
    with pytest.raises(SeamError, match="megatron-core is not installed"):
        patch()
