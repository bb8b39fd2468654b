"""torchrun, with a line that says what went wrong in place of its own traceback.

``python -m megatron_loco.launch.agent TORCHRUN FLAGS``: flags, ranks, logs and signals are those of ``python -m
torch.distributed.run``. Ranks whose entry point is recorded (``torch.distributed.elastic``'s ``record``) have their own
error in that line.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Sequence

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError

_MAX_CAUSES = 3


def main(argv: Sequence[str]) -> int:
    """Run torchrun to its end.

    Args:
        argv: Its flags, and the command of the ranks.

    Returns:
        The exit status: 0, 1 if a rank failed or the nodes did not meet, 128 + the number of a signal.
    """
    try:
        torchrun.main(list(argv))
    except ChildFailedError as error:
        problem = _failures(error)
    except SignalException as error:
        _say(f"stopped by {signal.Signals(error.sigval).name}")
        return 128 + error.sigval
    except (DistNetworkError, DistStoreError, RendezvousError) as error:
        problem = _no_meeting(error, argv)
    else:
        return 0
    _say(problem)
    return 1


def _failures(error: ChildFailedError) -> str:
    """The distinct causes, in the order in which they came up; torchrun ends the other ranks by SIGTERM."""
    ranks: dict[str, list[int]] = {}
    failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
    own = [(rank, failure) for rank, failure in failures if failure.exitcode != -signal.SIGTERM]
    for rank, failure in own or failures:
        ranks.setdefault(_cause(failure), []).append(rank)
    named = [f"rank{'s' * (len(those) > 1)} {', '.join(map(str, those))}: {cause}" for cause, those in ranks.items()]
    return f"on {socket.gethostname()} {'; then '.join(named[:_MAX_CAUSES])}"


def _cause(failure: ProcessFailure) -> str:
    if isinstance(failure.message, dict):  # recorded by the rank
        return str(failure.message["message"]).strip().splitlines()[0]
    if failure.exitcode >= 0:
        return f"exit status {failure.exitcode}, the messages above say why"
    hint = ", as the system does where memory runs out" if failure.exitcode == -signal.SIGKILL else ""
    return f"killed by {failure.signal_name()}{hint}"


def _no_meeting(error: Exception, argv: Sequence[str]) -> str:
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    args = torchrun.parse_args(list(argv))
    if args.standalone or not args.master_addr:
        return f"the ranks of this node cannot meet: {said}"
    where = f"MASTER_ADDR:MASTER_PORT = {args.master_addr}:{args.master_port}"
    if "EADDRINUSE" in said or "already in use" in said:
        return f"{where}: the port is taken on this machine by another process; set MASTER_PORT to a free one"
    if args.node_rank == 0:
        return f"{where}: not all {args.nnodes} nodes came ({said}); are they started, and do they reach this one?"
    return f"{where}: no meeting with node 0 ({said}); is it started, is this its address, and is the port open?"


def _say(problem: str) -> None:
    print(f"error: {problem}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
