"""``megatron-loco``: one command for what the package does. Also ``python -m megatron_loco.launch.cli``.

Modules are imported only by the sub-command that needs them: help and mistakes are told at once.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

PROGRAM = "megatron-loco"

COMMANDS = {
    "train": (
        "megatron_loco.launch.__main__",
        "run a YAML configuration: train CONFIG.yaml [KEY=VALUE ...]",
    ),
    "plan": ("megatron_loco.launch.plan", "bytes, time and memory on a cluster, before any GPU hour is spent"),
    "doctor": ("megatron_loco.launch.doctor", "check this machine and its ranks, and say what to fix"),
    "report": (
        "megatron_loco.launch.report",
        "what runs logged, side by side: report RUN_DIR [RUN_DIR ...]",
    ),
    "patch": ("megatron_loco.launch.patch_tree", "put LoCo into the files of a Megatron: patch apply PATH"),
    "bench": ("", "run a benchmark: bench NAME [...]; without a name, list them"),
}

BENCHMARKS = {
    "exchange": "time of one gradient reduction over emulated links",
    "hooks": "LoCo beside PyTorch's own DDP hooks: loss and bytes per step",
    "kernels": "encode and decode of every backend against what memory allows",
    "step_share": "share of a training step that encode and decode take",
    "topology": "LoCo against stock Megatron on every way to spread ranks: deviation and bytes",
    "wire": "bytes on the wire, counted by the kernel, against the formula",
}

EXAMPLES_OF = {
    "train": f"""
examples:
  {PROGRAM} train configs/llama_quickstart.yaml
  {PROGRAM} train configs/llama_quickstart.yaml train-iters=1000 loco.block_size=128 run.name=longer
  {PROGRAM} train configs/llama_quickstart.yaml loco.bits=off --dry-run

exit status: that of the run; 2 for a mistake in the configuration""",
    "report": f"""
examples:
  {PROGRAM} report runs/llama_quickstart
  {PROGRAM} report runs/with_loco runs/without""",
}
"""Behind the help of commands whose own parser has no examples."""

EXAMPLES = f"""examples:
  {PROGRAM} train configs/llama_quickstart.yaml train-iters=50
  {PROGRAM} plan --params 6.7e9 --tokens-per-gpu 4096 --gpu a100 --nodes 8 --network-gbit 200
  {PROGRAM} doctor --nproc 2
  {PROGRAM} report runs/llama_quickstart
  {PROGRAM} patch status ~/Megatron-LM
  {PROGRAM} bench wire --ranks 4
  {PROGRAM} COMMAND --help

exit status: 0 all is well, 1 a check found a problem, 2 wrong usage or configuration; train: that of the run
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command.

    Args:
        argv: Arguments of the command line; ``None`` takes those of the process.

    Returns:
        The exit status of the sub-command; 2 for wrong usage.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command = words[0] if words else ""
    try:
        if command == "bench":
            return _bench(words[1:])
        if command in COMMANDS:
            return _call(COMMANDS[command][0], words[1:])
        _parser().parse_args(words)  # help, version, or a mistake: it exits
    except SystemExit as ending:  # argparse says what it has to say, and ends
        if not ending.code and {"-h", "--help"} & {*words[1:]}:
            print(EXAMPLES_OF.get(command, ""), end="\n" * (command in EXAMPLES_OF))
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    _parser().print_help(sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    from megatron_loco import __version__

    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="4-bit gradient communication for Megatron-LM.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for name, (_, help_text) in COMMANDS.items():
        commands.add_parser(name, help=help_text, add_help=False)
    return parser


def _bench(words: Sequence[str]) -> int:
    listed = "\n".join(f"  {name:<11} {line}" for name, line in BENCHMARKS.items())
    usage = f"usage: {PROGRAM} bench NAME [...]\n\n{listed}\n\nexample: {PROGRAM} bench wire --ranks 4"
    if not words or words[0] in ("-h", "--help"):
        print(usage)
        return 0
    if words[0] not in BENCHMARKS:
        from megatron_loco.launch.sections import nearest

        print(f"error: there is no benchmark {words[0]!r}{nearest(words[0], BENCHMARKS)}\n{usage}", file=sys.stderr)
        return 2
    return _call(f"megatron_loco.bench.{words[0]}", words[1:])


def _call(module: str, words: Sequence[str]) -> int:
    status = importlib.import_module(module).main(list(words))
    return int(status or 0)


if __name__ == "__main__":
    sys.exit(main())
