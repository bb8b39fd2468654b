"""All checks of a whole set of arguments, Megatron's own among them, before data is prepared and ranks are started."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

from megatron_loco.config import LoCoConfig
from megatron_loco.cpu import check_arguments
from megatron_loco.integrations.megatron.arguments import check_combinations
from megatron_loco.launch.megatron_flags import quiet
from megatron_loco.patching import Patch, apply


def validate(
    argv: Sequence[str], *, loco: LoCoConfig | None, device: str, world_size: int, environment: Mapping[str, str]
) -> None:
    """Check what Megatron, LoCo and the device say of the arguments, as rank 0 would.

    Megatron looks at ``sys.argv`` and the environment, so both are replaced for the duration of the call. Without a GPU
    its question for the compute capability is answered with that of an H100; any other check that asks for a GPU says
    nothing about the settings and ends the validation here. The ranks run it again.

    Args:
        argv: Megatron's arguments, without those of LoCo, which the stock parser does not know.
        loco: LoCo's settings, or ``None`` where it is off.
        device: ``cpu`` or ``cuda``.
        world_size: Ranks of the whole job.
        environment: Environment variables of the ranks.

    Raises:
        ValueError: the combination is refused; the message is that of whoever refuses it.
    """
    from megatron.training.arguments import parse_args, validate_args

    said = io.StringIO()
    ranks = {**environment, "RANK": "0", "WORLD_SIZE": str(world_size)}
    with (
        _process_state(argv, ranks),
        quiet(),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        _recent_gpu(device),
    ):
        try:
            args = parse_args()
            for name, value in dataclasses.asdict(loco).items() if loco is not None else ():
                setattr(args, f"loco_{name}", value)
            if device == "cpu":
                check_arguments(args)
            check_combinations(args)
        except SystemExit:
            problem = said.getvalue().strip().splitlines()[-1:]
            raise ValueError(f"Megatron refuses these settings: {''.join(problem)}") from None
        try:
            validate_args(args)
        except Exception as error:  # Megatron validates with assertions, ValueError and others
            frame = traceback.extract_tb(error.__traceback__)[-1]
            if "cuda" in Path(frame.filename).parts:
                # Past the redirection: that a check was cut short is for the user to see.
                print(
                    "note: Megatron's own check needs a GPU from here on; the ranks run it again", file=sys.__stderr__
                )
                return
            reason = str(error) or f"{type(error).__name__} at: {frame.line}"
            raise ValueError(f"Megatron refuses these settings: {reason}") from None


def _recent_gpu(device: str) -> contextlib.AbstractContextManager[object]:
    # A configuration for GPUs is checked where it is written, too. Of the GPU Megatron only asks how recent it is.
    if device != "cuda" or torch.cuda.is_available():
        return contextlib.nullcontext()
    why = "Megatron's validation asks a GPU for its compute capability, and there is none here"
    hopper = SimpleNamespace(major=9, minor=0)
    return apply(
        [
            Patch(target="torch.cuda:get_device_capability", kind="replace", new=lambda *_: (9, 0), why=why),
            Patch(target="torch.cuda:get_device_properties", kind="replace", new=lambda *_: hopper, why=why),
        ]
    )


@contextlib.contextmanager
def _process_state(argv: Sequence[str], environment: Mapping[str, str]) -> Iterator[None]:
    old_argv, old_environment = sys.argv, dict(os.environ)
    sys.argv = ["pretrain_gpt.py", *argv]
    os.environ.clear()
    os.environ.update(environment)
    try:
        yield
    finally:
        sys.argv = old_argv
        os.environ.clear()
        os.environ.update(old_environment)
