"""``megatron-loco doctor``: check versions, devices, network and the collectives of real ranks, and say what to fix.

Without a launcher it starts ranks on this machine. Under torchrun, or wherever RANK is set, it uses the ranks that are
given: every rank checks its collectives, and the rank that is first on its node prints what it sees there.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from megatron_loco.launch import doctor_checks
from megatron_loco.launch.doctor_checks import FAIL, NOT_APPLICABLE, OK, WARN, Finding

EXAMPLES = """examples:
  megatron-loco doctor                                  # this machine, two local ranks
  megatron-loco doctor --nproc 8 --backend nccl         # the eight GPUs of this node
  torchrun --nnodes 2 --nproc-per-node 8 --node-rank 0 --master-addr ADDRESS --master-port 29500 \\
      -m megatron_loco.launch.doctor                    # all ranks of two nodes (the same on the other, rank 1)

exit status: 0 nothing failed (warnings included), 1 a check failed, 2 wrong usage
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="megatron-loco doctor",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nproc", type=int, help="local ranks; default: one per GPU, at least 2 (Gloo) or 1 (NCCL)")
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl if there are GPUs")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for the ranks to answer; default: 60")
    options = parser.parse_args(argv)
    given = "RANK" in os.environ
    problem = _misuse(options, given)
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    import torch

    from megatron_loco.launch import doctor_ranks

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backend = options.backend or ("nccl" if num_gpus else "gloo")
    findings: list[Finding] = []
    speaks = not given or os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"
    if speaks:
        for check in doctor_checks.CHECKS:
            for finding in check():
                findings.append(finding)
                _say(finding)
    if given:
        found = doctor_ranks.check_given(backend, options.timeout)
    else:
        nproc = options.nproc or (max(1, num_gpus) if backend == "nccl" else max(2, num_gpus))
        found = doctor_ranks.check_local(backend, nproc, num_gpus, options.timeout)
    for finding in found:
        findings.append(finding)
        if speaks or finding.status == FAIL:
            _say(finding)
    failed = sum(finding.status == FAIL for finding in findings)
    if speaks:
        warned = sum(finding.status == WARN for finding in findings)
        print(f"{failed} failed, {warned} warning(s)" if failed or warned else "all is well")
    return 1 if failed else 0


def _misuse(options: argparse.Namespace, given: bool) -> str:
    if options.nproc is not None and options.nproc < 1:
        return f"--nproc must be at least 1, got {options.nproc}"
    if not options.timeout > 0:
        return f"--timeout must be greater than 0, got {options.timeout}"
    if given and options.nproc is not None:
        return "--nproc: RANK is set, so the ranks are given; leave it out, or unset RANK to start local ranks"
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if given and missing:
        return f"RANK is set, but the environment lacks {', '.join(missing)}; use torchrun, or unset RANK"
    return ""


def _say(finding: Finding) -> None:
    marks = {OK: "ok  ", WARN: "WARN", FAIL: "FAIL", NOT_APPLICABLE: "n/a "}
    text = "not applicable: " + finding.text if finding.status == NOT_APPLICABLE else finding.text
    print(f"{marks[finding.status]}  {finding.name}: {text}", flush=True)
    if finding.remedy:
        print(f"      -> {finding.remedy}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
