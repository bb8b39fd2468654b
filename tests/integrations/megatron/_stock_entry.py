"""A rank of unpatched Megatron on the CPU: the baseline of the comparisons."""

import sys
import warnings

from megatron_loco import cpu

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    with cpu.enter():
        from megatron_loco.launch.entry import flush_logs, shut_down
        from megatron_loco.launch.pretrain_gpt import main

        sys.argv[0] = "pretrain_gpt"
        main()
        flush_logs()
        shut_down()
