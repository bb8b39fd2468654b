"""A rank of a run in which rank 1 is killed in the middle of its sixth exchange, by a signal that nobody can handle."""

import os
import signal
import sys
from typing import Any

import torch.distributed as dist

from megatron_loco.launch.entry import main
from megatron_loco.launch.pretrain_gpt import main as pretrain_gpt

STEP = 6

if __name__ == "__main__":

    def train() -> None:
        original = dist.all_to_all_single
        exchanges = 0

        def all_to_all_single(*args: Any, **kwargs: Any) -> Any:
            nonlocal exchanges
            exchanges += bool(kwargs.get("async_op"))  # the check at the start is synchronous
            if exchanges == STEP:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        if os.environ["RANK"] == "1":
            dist.all_to_all_single = all_to_all_single
        pretrain_gpt()

    sys.modules["megatron_loco.launch.pretrain_gpt"].main = train  # type: ignore[attr-defined]
    main(sys.argv[1:])
