"""The handle: what remains to be computed happens once, after the transfer, and failures are not forgotten."""

from __future__ import annotations

import pytest

from megatron_loco.collectives.work import Work


class Transfer:
    """A transfer that notes what is asked of it."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.done = False
        self.error: Exception | None = None

    def wait(self) -> bool:
        self.events.append("transfer")
        if self.error:
            raise self.error
        self.done = True
        return True

    def is_completed(self) -> bool:
        return self.done


@pytest.mark.kind(13, 15)
def test_finishes_once_after_the_transfer() -> None:
    events: list[str] = []
    work = Work(Transfer(events), lambda: events.append("finish"))
    assert events == []
    work.wait()
    assert events == ["transfer", "finish"]
    work.wait()
    assert events == ["transfer", "finish"]


@pytest.mark.kind(15)
def test_completion_follows_the_transfer() -> None:
    transfer = Transfer([])
    work = Work(transfer, lambda: None)
    assert not work.is_completed()
    transfer.done = True
    assert work.is_completed()
    work.wait()
    assert work.is_completed()


def test_asking_does_not_wait() -> None:
    events: list[str] = []
    work = Work(Transfer(events), lambda: events.append("finish"))
    work.is_completed()
    assert events == []


@pytest.mark.kind(15)
def test_failed_transfer_leaves_no_result() -> None:
    events: list[str] = []
    transfer = Transfer(events)
    transfer.error = RuntimeError("connection closed")
    work = Work(transfer, lambda: events.append("finish"))
    for _ in range(2):  # the second wait must not pass for a success
        with pytest.raises(RuntimeError, match="connection closed"):
            work.wait()
    assert "finish" not in events
    assert not work.is_completed()


def test_failed_computation_is_not_a_result() -> None:
    def finish() -> None:
        raise ValueError("no result")

    work = Work(Transfer([]), finish)
    for _ in range(2):
        with pytest.raises(ValueError, match="no result"):
            work.wait()
