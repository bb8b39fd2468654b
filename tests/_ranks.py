"""Run functions on several real Gloo ranks, each a process of its own, and collect what they return.

Ranks are forked from a server that has imported torch and Megatron once: the imports cost each rank up to ten seconds
of processor time, a fork none.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

TIMEOUT_S = 120
"""For one job, start included, and for each collective."""

GRACE_S = 5
"""After one rank failed, for the others to report their own (usually derived) failure."""


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` on ``world_size`` fresh ranks with the default group initialised.

    Args:
        function: A function of a module (it is imported by the ranks); tensors in its result must be on the CPU.
        world_size: Number of processes.
        args: Further arguments, picklable.

    Returns:
        The results in rank order.

    Raises:
        AssertionError: a rank failed or did not end in time; with the tracebacks of those that failed.
    """
    with RankPool(world_size) as pool:
        return pool.run(_on_default_group, world_size, function, *args)


class RankPool:
    """Ranks that stay up and run one function after another, for many short cases; a context manager.

    A job that fails ends the ranks, since their collectives may be out of step; the next job starts fresh ones.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
        """Call ``function(group, *args)`` on the first ``size`` ranks, with a group of just them.

        Returns:
            The results in rank order.

        Raises:
            AssertionError: as for :func:`run_ranks`.
        """
        if not self._processes:
            self._start()
        job = _dumps((function, size, args))
        for connection in self._connections:
            connection.send_bytes(job)
        outcomes = self._collect()
        failures = [f"rank {rank}:\n{error}" for rank, (_, error) in enumerate(outcomes) if error]
        if failures:
            self._kill()
        assert not failures, "\n".join(failures)
        return [value for value, _ in outcomes[:size]]

    def close(self) -> None:
        """End the ranks."""
        for connection in self._connections:
            connection.send_bytes(_dumps(None))
        for process in self._processes:
            process.join(GRACE_S)
        self._kill()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "megatron.training.training"])
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            # The environment is handed over: the server has that of its own start.
            process = context.Process(
                target=_rank_main, args=(theirs, rank, self.world_size, store, dict(os.environ)), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(self) -> list[tuple[Any, str | None]]:
        outcomes: list[tuple[Any, str | None]] = [(None, f"did not answer within {TIMEOUT_S} s")] * self.world_size
        waiting = dict(zip(self._connections, range(self.world_size), strict=True))
        deadline = time.monotonic() + TIMEOUT_S
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    outcomes[rank] = _loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    outcomes[rank] = (None, "ended without a result")
                if outcomes[rank][1]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return outcomes

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _rank_main(connection: Connection, rank: int, world_size: int, store: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    groups: dict[int, Any] = {}
    try:
        dist.init_process_group(
            "gloo",
            store=FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        groups[world_size] = dist.group.WORLD
        while (job := _loads(connection.recv_bytes())) is not None:
            function, size, args = job
            if size not in groups:
                groups[size] = dist.new_group(list(range(size)))
            value = function(groups[size], *args) if rank < size else None
            dist.barrier()
            connection.send_bytes(_dumps((value, None)))
        dist.destroy_process_group()
    except BaseException:
        connection.send_bytes(_dumps((None, traceback.format_exc())))


def _on_default_group(group: dist.ProcessGroup, function: Callable[..., Any], *args: Any) -> Any:
    return function(group.rank(), group.size(), *args)


def _dumps(value: Any) -> bytes:
    # torch.save and not the pickler of torch.multiprocessing, which passes memory whose owner may end first.
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    return buffer.getvalue()


def _loads(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)
