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
    work = Work([Transfer(events)], lambda _: events.append("decode"), lambda: events.append("finish"))
    assert events == []
    work.wait()
    assert events == ["transfer", "decode", "finish"]
    work.wait()
    assert events == ["transfer", "decode", "finish"]


@pytest.mark.kind(15)
def test_completion_follows_the_transfer() -> None:
    transfer = Transfer([])
    work = Work([transfer], lambda _: None, lambda: None)
    assert not work.is_completed()
    transfer.done = True
    assert work.is_completed()
    work.wait()
    assert work.is_completed()


def test_asking_does_not_wait() -> None:
    events: list[str] = []
    work = Work([Transfer(events)], lambda _: events.append("decode"), lambda: events.append("finish"))
    work.is_completed()
    assert events == []


@pytest.mark.kind(15)
def test_failed_transfer_leaves_no_result() -> None:
    events: list[str] = []
    transfer = Transfer(events)
    transfer.error = RuntimeError("connection closed")
    work = Work([transfer], lambda _: events.append("decode"), lambda: events.append("finish"))
    for _ in range(2):  # the second wait must not pass for a success
        with pytest.raises(RuntimeError, match="connection closed"):
            work.wait()
    assert events == ["transfer", "transfer"]
    assert not work.is_completed()


def test_failed_computation_is_not_a_result() -> None:
    def decode(_: int) -> None:
        raise ValueError("no result")

    work = Work([Transfer([])], decode, lambda: None)
    for _ in range(2):
        with pytest.raises(ValueError, match="no result"):
            work.wait()


@pytest.mark.kind(15)
def test_each_part_is_computed_after_its_own_transfer() -> None:
    events: list[str] = []
    transfers = [Transfer(events) for _ in range(3)]
    work = Work(transfers, lambda index: events.append(f"decode {index}"), lambda: events.append("finish"))
    transfers[0].done = transfers[1].done = True
    assert not work.is_completed()
    transfers[2].error = RuntimeError("connection closed")
    with pytest.raises(RuntimeError, match="connection closed"):
        work.wait()
    assert events == ["transfer", "decode 0", "transfer", "decode 1", "transfer"]
    assert not work.is_completed()
    # A transfer that does come later (a caller that repeats after a timeout): what was computed is not computed anew.
    transfers[2].error = None
    events.clear()
    work.wait()
    assert events == ["transfer", "decode 2", "finish"]
    assert work.is_completed()
