"""Processes on emulated nodes that run the arms of :mod:`megatron_loco.bench.exchange` on request."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from megatron_loco.bench.exchange_arms import Bench, Plan
from megatron_loco.bench.namespaces import NODE_INTERFACE, EmulatedNodes

_COLLECTIVE_TIMEOUT = timedelta(minutes=5)


class Ranks:
    """Processes on emulated nodes that run the arms on request; a context manager that ends them in every case.

    Args:
        num_ranks: How many, one per node.
        plan: What to measure.
        nodes: At least as many nodes.
    """

    def __init__(self, num_ranks: int, plan: Plan, nodes: EmulatedNodes) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        context = multiprocessing.get_context("spawn")
        os.environ["GLOO_SOCKET_IFNAME"] = NODE_INTERFACE
        try:
            for rank in range(num_ranks):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(theirs, rank, num_ranks, self._folder.name, plan), daemon=True
                )
                with nodes.inside(rank):
                    process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def call(self, request: str) -> list[Any]:
        """Let all ranks do something, and return their answers in rank order.

        Raises:
            RuntimeError: a rank failed; with its message.
        """
        for connection in self._connections:
            connection.send(request)
        answers: dict[int, Any] = {}
        waiting = dict(enumerate(self._connections))
        while waiting:
            ready = wait(waiting.values())
            for rank, connection in [item for item in waiting.items() if item[1] in ready]:
                del waiting[rank]
                try:
                    answers[rank], failure = connection.recv()
                except EOFError:
                    failure = "ended without an answer"
                if failure:
                    raise RuntimeError(f"rank {rank}: {failure}")
        return [answers[rank] for rank in range(len(answers))]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()


def _serve(connection: Connection, rank: int, num_ranks: int, folder: str, plan: Plan) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # the name reduce_scatter_tensor, which Megatron uses
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=num_ranks,
            timeout=_COLLECTIVE_TIMEOUT,
        )
        assert dist.group.WORLD is not None
        bench = Bench(plan, dist.group.WORLD)
        while True:
            request = connection.recv()
            connection.send((bench.check(NODE_INTERFACE) if request == "check" else bench.round(), None))
    except EOFError:
        pass  # the parent is gone
    except RuntimeError as error:
        connection.send((None, str(error)))
    except BaseException:
        connection.send((None, traceback.format_exc()))
