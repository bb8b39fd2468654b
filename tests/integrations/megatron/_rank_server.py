"""Starts the ranks of a Megatron run by forking, for tests: ``python -m tests.integrations.megatron._rank_server``.

Importing torch and Megatron costs each rank 5 to 10 seconds of processor time. This server imports them once and forks
the ranks of one run after another; what a rank executes is the same ``python -m MODULE ARGUMENTS`` as under torchrun.

One request per line on stdin, JSON: ``{"module", "arguments", "num_ranks", "environment", "output"}``; one answer per
line on stdout: the exit status of the run, 0 only if that of every rank is. As with torchrun, the other ranks are ended
when one fails.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Mapping
from typing import Any

_PRELOADED = (
    "megatron.training.training",
    "megatron_loco.cpu",
    "megatron_loco.integrations.megatron",
    "megatron_loco.launch.pretrain_gpt",
    "torch.utils.tensorboard",
)


def _preload() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in _PRELOADED:
            importlib.import_module(module)
    if "MEGATRON_ONLY_FROM" in os.environ:
        from tests._releases import check_origin

        check_origin()


def _run(request: Mapping[str, Any]) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    num_ranks = request["num_ranks"]
    ranks = {}
    for rank in range(num_ranks):
        environment = {
            **request["environment"],
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            **{"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "GROUP_RANK": "0"},
        }
        pid = os.fork()
        if not pid:
            _become_rank(request, environment)
        ranks[pid] = rank
    failed = 0
    while ranks:
        pid, status = os.wait()
        if ranks.pop(pid, None) is None:
            continue
        code = os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = code
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    return failed


def _become_rank(request: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    # Never returns: the rank must not come back into the server's loop.
    code = 1
    try:
        output = os.open(request["output"], os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[1:] = request["arguments"]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # among them the one that ends the rank's own processes, such as checkpoint writers
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Serve until stdin is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is not an answer
    _preload()
    for line in sys.stdin:
        print(_run(json.loads(line)), file=answers, flush=True)


if __name__ == "__main__":
    main()
