"""``python -m megatron_loco.launch.slurm CONFIG.yaml [KEY=VALUE ...]``: what a run in a Slurm job adds to its settings.

The job scripts in ``scripts/slurm`` call it once, before they start a launcher on every node. It prints the folder of
the checkpoints, by which the scripts see whether a run went on, and then the ``KEY=VALUE`` words that they add:

* as many nodes and ranks as Slurm allocated;
* the run continues from its own newest checkpoint, so that a requeued job goes on where it stopped;
* Megatron saves and exits at ``SIGURG``. Slurm signals *every* process of a job step. SIGUSR1 or SIGTERM would end all
  that have no handler: ranks that are starting, and the process that Megatron starts at its first save and needs for
  the next. torchrun would take a second one, from the launcher, for an order to end the ranks in mid-save, and its
  status would be that of a failure. SIGURG is ignored by all but Megatron.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence

from megatron_loco.launch import overrides, yaml_file
from megatron_loco.launch.overrides import DEFAULT_FOLDERS
from megatron_loco.launch.resolve import OwnSections
from megatron_loco.launch.sections import MEGATRON_SECTIONS
from megatron_loco.launch.values import Document, Setting, Value, describe, located

EXIT_SIGNAL = "SIGURG"

FORGETS = ("finetune", "no-load-optim", "ckpt-step")
"""Flags with which a job would not continue from its newest checkpoint, or not with its optimizer and error state."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the folder of the checkpoints and the words, one a line.

    Args:
        argv: Arguments of the command line; ``None`` takes those of the process.

    Returns:
        The exit status: 2 for a configuration that does not fit the job.
    """
    parser = argparse.ArgumentParser(
        prog="python -m megatron_loco.launch.slurm", description="Print what a run in a Slurm job adds to CONFIG."
    )
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="section.key=value, wins over the file")
    options = parser.parse_args(argv)
    try:
        save, words = job_words(options.config, options.overrides, os.environ)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(save, *words, sep="\n")
    return 0


def job_words(config_file: str, words: Sequence[str], environment: Mapping[str, str]) -> tuple[str, list[str]]:
    """Fit a configuration to the job.

    Args:
        config_file: The configuration.
        words: ``KEY=VALUE`` words of the user.
        environment: Environment variables of the job.

    Returns:
        The folder of the checkpoints, and the words to add behind the user's.

    Raises:
        ValueError: the configuration has a mistake or contradicts the job, or a variable of Slurm is missing.
    """
    document = overrides.apply(yaml_file.load(config_file), words)
    run = OwnSections.read(document, config_file=config_file).run
    num_nodes = _slurm_number(environment, "SLURM_JOB_NUM_NODES")
    if num_nodes is None:
        raise ValueError("SLURM_JOB_NUM_NODES is not set; this is for job scripts, see scripts/slurm")
    nnodes = document.get("run", {}).get("nnodes")
    remedy = f"sbatch --nodes={run.nnodes}, or leave the key out"
    _refuse_other(nnodes, "run.nnodes", num_nodes, f"the job has nodes: {num_nodes}; {remedy}")
    result = [f"run.nnodes={num_nodes}"]

    nproc = document.get("run", {}).get("nproc_per_node")
    gpus = _slurm_number(environment, "SLURM_GPUS_ON_NODE")
    if run.device != "cpu" and gpus is not None:
        remedy = f"sbatch --gpus-per-node={run.nproc_per_node}, or leave the key out"
        _refuse_other(nproc, "run.nproc_per_node", gpus, f"the job has GPUs per node: {gpus}; {remedy}")
        result.append(f"run.nproc_per_node={gpus}")
    elif run.device != "cpu" and (nproc is None or nproc.value is None):
        raise ValueError("the job does not say how many GPUs a node has: --gpus-per-node=N, or run.nproc_per_node=N")

    save = _save_folder(document, run.output_dir)
    load = _find(document, "load")
    remedy = "leave the key out; pretrained-checkpoint names one to start from"
    _refuse_other(load, "load", save, f"the job continues from its own checkpoints in {save}; {remedy}")
    problem = f"the job could not continue from its newest checkpoint; {remedy}"
    for key in FORGETS:
        _refuse_other(_find(document, key), key, False, problem)
    for key, value in (("exit-signal-handler", True), ("exit-signal", EXIT_SIGNAL)):
        _refuse_other(_find(document, key), key, value, f"the job needs {describe(value)}; leave the key out")
    result += [f"checkpoint.load={json.dumps(save, ensure_ascii=False)}"]
    result += ["training.exit-signal-handler=true", f"training.exit-signal={EXIT_SIGNAL}"]
    return save, result


def _slurm_number(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name)
    if not value:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{name} must be a number from 1, got {value!r}")
    return int(value)


def _find(document: Document, key: str) -> Setting | None:
    return next((document[name][key] for name in MEGATRON_SECTIONS if key in document.get(name, {})), None)


def _refuse_other(setting: Setting | None, key: str, needed: Value, problem: str) -> None:
    if setting is not None and setting.value not in (None, needed):
        raise located(setting.where, key, f"is {describe(setting.value)}, but {problem}")


def _save_folder(document: Document, output_dir: str) -> str:
    setting = _find(document, "save")
    if setting is None:
        return f"{output_dir}/{DEFAULT_FOLDERS['save']}"
    if not isinstance(setting.value, str):
        problem = f"names the folder of the checkpoints that the job continues from, got {describe(setting.value)}"
        raise located(setting.where, "save", problem)
    return setting.value


if __name__ == "__main__":
    sys.exit(main())
