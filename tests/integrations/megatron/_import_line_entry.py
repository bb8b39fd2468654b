"""A user's own training script, as the README shows it: Megatron is imported by name before ``patch()``."""

import warnings

from megatron_loco import cpu

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    cpu.enter()

    from megatron_loco.launch.entry import flush_logs, shut_down
    from megatron_loco.launch.pretrain_gpt import main

    import megatron_loco  # isort: skip

    megatron_loco.patch()
    main()
    flush_logs()
    shut_down()
