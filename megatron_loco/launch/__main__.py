"""``python -m megatron_loco.launch CONFIG.yaml [KEY=VALUE ...]``: check, show, prepare data, run under torchrun."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_loco.launch import (
    checkout,
    corpus,
    overrides,
    preflight,
    preflight_checkpoint,
    report,
    torchrun,
    yaml_file,
)
from megatron_loco.launch.megatron_checks import validate
from megatron_loco.launch.megatron_flags import MegatronFlags
from megatron_loco.launch.resolve import OwnSections, resolve
from megatron_loco.launch.run_config import settle_device


def main(argv: Sequence[str] | None = None) -> int:
    """Run a configuration.

    Args:
        argv: Arguments of the command line; ``None`` takes those of the process.

    Returns:
        The exit status: torchrun's, 0 after a dry run, 2 for a mistake in the configuration.
    """
    parser = argparse.ArgumentParser(prog="python -m megatron_loco.launch", description="Run a YAML configuration.")
    parser.add_argument("config", metavar="CONFIG.yaml", help="the configuration; its keys are checked strictly")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="section.key=value, wins over the file")
    parser.add_argument("--dry-run", action="store_true", help="print and stop; so does DRY_RUN=1 in the environment")
    options = parser.parse_intermixed_args(argv)
    dry_run = options.dry_run or os.environ.get("DRY_RUN", "0") not in ("", "0")
    try:
        return _launch(options.config, options.overrides, dry_run=dry_run)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _launch(config_file: str, words: Sequence[str], *, dry_run: bool) -> int:
    document = overrides.apply(yaml_file.load(config_file), words)
    own = OwnSections.read(document, config_file=config_file)
    warnings: list[str] = []
    try:
        rendezvous = torchrun.Rendezvous.from_environment(own.run.nnodes, os.environ, own.run.rendezvous_timeout_s)
    except ValueError as error:
        if not dry_run:
            raise
        rendezvous = torchrun.Rendezvous()  # several nodes, looked at from one that is none of them
        warnings.append(str(error))
    nproc_per_node = own.run.nproc_per_node
    environment = torchrun.rank_environment(own.environment(), nproc_per_node=nproc_per_node, environment=os.environ)
    script = checkout.training_script(environment, own.run.script)
    if script is not None:
        checkout.prefer_megatron_of(script)
    own = dataclasses.replace(own, run=settle_device(own.run))
    run = own.run
    if run.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # the CPU runtime refuses to hide a GPU that it was not told to hide

    flags = MegatronFlags.load()
    prepared = None if run.corpus is None else corpus.find(run.corpus, run.data_dir)
    resolved = resolve(document, own, flags, prepared)
    args = preflight.parse(resolved.megatron_argv)
    checkout.check_script(args, script)
    preflight.check_layout(args, run)
    try:
        warnings += preflight.check(
            args,
            run=run,
            loco=own.loco,
            rendezvous=rendezvous,
            environment=environment,
            own_script=script is None,
        )
    except ValueError as error:
        if not dry_run:
            raise
        warnings.append(f"the run would stop on this machine: {error}")
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    validate(
        resolved.megatron_argv,
        loco=own.loco,
        device=run.device,
        world_size=run.nnodes * nproc_per_node,
        environment=environment,
    )
    if run.corpus is not None and not dry_run:
        try:
            prepared = corpus.prepare(run.corpus, run.data_dir)
        except OSError as error:
            problem = f"{error.filename or run.data_dir}: {error.strerror}"
            raise ValueError(f"run.data_dir: the corpus cannot be prepared: {problem}") from None
        resolved = resolve(document, own, flags, prepared)

    comment = f"{config_file}, resolved by megatron_loco.launch"
    if prepared is not None:
        comment += f"\ncorpus: {run.corpus}, sha256 {prepared.sha256}"
    elif run.corpus is not None:
        comment += f"\ncorpus: {run.corpus}, not prepared yet; the run sets data-path"
    print(resolved.as_yaml(comment=comment))
    print(f"Megatron arguments:\n{shlex.join(resolved.argv)}\n", flush=True)
    if dry_run:
        return 0
    command = torchrun.command(
        resolved.argv, rendezvous=rendezvous, nproc_per_node=nproc_per_node, device=run.device, script=script
    )
    if rendezvous.node_rank == 0:
        changed = {key: value for key, value in environment.items() if os.environ.get(key) != value}
        _record(Path(run.output_dir), resolved.as_yaml(comment=comment), command, changed)
    status = torchrun.run(command, environment)
    if status != 0 and rendezvous.node_rank == 0:
        problem = preflight_checkpoint.full_disk(args, run, own.loco)
        if problem:  # what the ranks say of a disk that filled up does not always name it
            print(f"error: {problem}", file=sys.stderr)
    if status == 0 and rendezvous.node_rank == 0:
        try:
            report.print_summary(Path(run.output_dir), prepared.entropy_nats if prepared is not None else None)
        except ValueError as error:  # the run is complete all the same: it may log elsewhere, or nothing
            print(f"note: no summary: {error}", file=sys.stderr)
    return status


def _record(output_dir: Path, resolved: str, command: Sequence[str], variables: Mapping[str, str]) -> None:
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "resolved.yaml").write_text(resolved, encoding="utf-8")
    words = ["env", *(f"{key}={value}" for key, value in variables.items()), *command]
    (output_dir / "command.txt").write_text(shlex.join(words) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
