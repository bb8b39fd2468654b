"""A rank under the launcher's entry, on a Megatron whose ``--rerun-mode report_stats`` works.

In megatron-core 0.19.0 to 0.19.2 the flag's value is not one of ``RerunMode``, and initialisation dies on it.
"""

import sys

from megatron.core.rerun_state_machine import RerunMode

from megatron_loco.launch.entry import main

if __name__ == "__main__":
    RerunMode._value2member_map_.setdefault("report_stats", RerunMode.REPORT_DETERMINISM_STATS)
    main(sys.argv[1:])
