"""Settings of every test session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# All tests run on CPU ranks, also on a machine with a GPU; whoever wants to see one there sets the variable.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch

# The tensors of the tests are small, and several ranks share the cores: threads would only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def attention_unchosen() -> Iterator[None]:
    """Megatron's models write NVTE_* variables, by the attention that they want; later tests start ranks with them."""
    before = {name: value for name, value in os.environ.items() if name.startswith("NVTE_")}
    yield
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]
    os.environ.update(before)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kind",
        type=int,
        action="append",
        default=[],
        metavar="NUMBER",
        help="only tests of this kind of bug (tests/bug_bank.py); may be given several times",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = set(config.getoption("--kind"))
    if not wanted:
        return
    others = [item for item in items if not any(wanted & {*mark.args} for mark in item.iter_markers("kind"))]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]
