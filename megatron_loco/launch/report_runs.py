"""What a run left behind: the scalars in its TensorBoard logs and the settings it was started with."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_loco.config import OFF
from megatron_loco.launch import yaml_file
from megatron_loco.launch.sections import MEGATRON_SECTIONS
from megatron_loco.launch.values import Value

LOSS = "lm loss"
VALIDATION_LOSS = "lm loss validation"
STEP_TIME = "iteration-time"
WIRE = "loco/wire-bytes-per-step"
BF16 = "loco/bf16-ring-bytes-per-step"
BITS = "loco/bits-per-element"
RELATIVE_ERROR = "loco/relative-compression-error"
ERROR_NORM = "loco/error-state-norm"
EXACT_STEPS = "loco/exact-steps"


@dataclass(frozen=True)
class Run:
    """Scalars that a run logged: ``scalars[tag][iteration]``; of a repeated iteration the last value.

    Attributes:
        name: Name of its folder.
        scalars: By tag and iteration. What a resumed run logged before the resume, at iterations that it then went
            through again or never reached again, is left out.
        settings: ``resolved.yaml``: Megatron's flags by name, others as ``section.key``; ``None`` if there is no such
            file.
        corpus: Checksum of the corpus that the launcher prepared, if it did.
        restarts: First iteration that was logged after each restart.
    """

    name: str
    scalars: dict[str, dict[int, float]]
    settings: dict[str, Value] | None = None
    corpus: str | None = None
    restarts: tuple[int, ...] = ()

    @classmethod
    def read(cls, output_dir: Path) -> Run:
        """Read ``<output_dir>/tensorboard`` and ``<output_dir>/resolved.yaml``.

        Raises:
            ValueError: there is no such folder, or nothing in it, or the settings cannot be read.
        """
        if not output_dir.is_dir():
            raise ValueError(f"{output_dir} is not a folder; name the output directory of a run")
        if not (output_dir / "tensorboard").is_dir():
            raise ValueError(
                f"{output_dir / 'tensorboard'} does not exist; is {output_dir} the output directory of a run?"
            )
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        logging.getLogger("tensorboard").setLevel(logging.WARNING)  # it reports each file that it has read to the end
        events = EventAccumulator(str(output_dir / "tensorboard"), size_guidance={"scalars": 0})
        events.Reload()
        tags = events.Tags()["scalars"]
        if not tags:
            raise ValueError(f"{output_dir / 'tensorboard'} holds no scalars; is this the output directory of a run?")
        restarts = _restarts(events.Scalars(LOSS)) if LOSS in tags else []
        scalars = {tag: _latest(tag, events.Scalars(tag), restarts) for tag in tags}
        settings, corpus = _settings(output_dir / "resolved.yaml")
        name = output_dir.name or output_dir.resolve().name  # "." has no name of its own
        return cls(name, scalars, settings, corpus, tuple(step for _, step in restarts))

    def at(self, tag: str, iteration: int) -> float | None:
        """Return the value of ``tag`` at ``iteration``, if it was logged there."""
        return self.scalars.get(tag, {}).get(iteration)

    def final(self, tag: str) -> float | None:
        """Return the last value of ``tag``."""
        values = self.scalars.get(tag)
        return values[max(values)] if values else None

    @property
    def has_loco(self) -> bool:
        """Whether LoCo was on: it logged something, or the settings say so."""
        return (
            any(tag.startswith("loco/") for tag in self.scalars) or (self.settings or {}).get("loco.bits", OFF) != OFF
        )

    @property
    def not_finite(self) -> int | None:
        """First iteration whose training or validation loss is NaN or infinite, or ``None``."""
        values = (self.scalars.get(tag, {}) for tag in (LOSS, VALIDATION_LOSS))
        wrong = [iteration for series in values for iteration, value in series.items() if not math.isfinite(value)]
        return min(wrong, default=None)

    @property
    def last_iteration(self) -> int:
        """Last iteration with a training loss; 0 if there is none."""
        return max(self.scalars.get(LOSS, {}), default=0)

    @property
    def missing_iterations(self) -> int:
        """Iterations between the last that was logged and the end of the run; 0 where its length is not known."""
        settings = self.settings or {}
        total, interval = settings.get("train-iters"), settings.get("tensorboard-log-interval") or 1
        if not isinstance(total, int) or not isinstance(interval, int):
            return 0
        missing = total - self.last_iteration
        return missing if missing >= interval else 0

    @property
    def warm_up(self) -> int:
        """Iteration at which the warm-up ends.

        The first logging interval is part of it (compilation, caches), and those after it in which LoCo still reduced
        exactly; a run that never compresses has only the first.
        """
        intervals = sorted(self.scalars.get(STEP_TIME, {})) or sorted(self.scalars.get(WIRE, {}))
        exact = self.scalars.get(EXACT_STEPS, {})
        for before, after in pairwise(intervals):
            if not exact.get(after):
                return before
        return intervals[0] if intervals else 0


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read runs that are to be compared.

    Args:
        folders: Their output directories.

    Returns:
        The runs, in that order, each with a training loss and a name of its own.

    Raises:
        ValueError: a run cannot be read, has no training loss, or is given twice.
    """
    for index, folder in enumerate(folders):
        if folder.resolve() in [other.resolve() for other in folders[:index]]:
            raise ValueError(f"{folder} is given twice")
    runs = [Run.read(folder) for folder in folders]
    for run, folder in zip(runs, folders, strict=True):
        if not run.scalars.get(LOSS):
            raise ValueError(f"{folder / 'tensorboard'} holds no {LOSS!r}; a training run of Megatron logs it")
    names = [run.name for run in runs]
    for index, folder in enumerate(folders):
        if names.count(runs[index].name) > 1:
            runs[index] = replace(runs[index], name=str(folder))
    return runs


def _restarts(losses: Sequence[Any]) -> list[tuple[float, int]]:
    # Wall time and iteration of each loss that does not come after the one logged before it.
    ordered = sorted(losses, key=lambda event: event.wall_time)
    return [(after.wall_time, after.step) for before, after in pairwise(ordered) if after.step <= before.step]


def _latest(tag: str, events: Sequence[Any], restarts: Sequence[tuple[float, int]]) -> dict[int, float]:
    if not tag.endswith(" vs samples"):  # those count samples, not iterations
        # A resumed run that stopped earlier than the one before it would otherwise end in the older one's values.
        events = [e for e in events if not any(e.wall_time < time and e.step >= step for time, step in restarts)]
    values = {e.step: e.value for e in sorted(events, key=lambda event: event.wall_time)}
    return dict(sorted(values.items()))


def _settings(path: Path) -> tuple[dict[str, Value] | None, str | None]:
    if not path.exists():
        return None, None
    settings = {
        key if section in MEGATRON_SECTIONS else f"{section}.{key}": setting.value
        for section, keys in yaml_file.load(path).items()
        for key, setting in keys.items()
    }
    corpus = re.search(r"^# corpus: .*sha256 ([0-9a-f]{64})$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return settings, corpus[1] if corpus else None
