"""Runs that belong together, and what sets two of them apart: arms, seeds, settings, data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_loco.launch.report_runs import VALIDATION_LOSS, Run
from megatron_loco.launch.resolve import DATA_SOURCES
from megatron_loco.launch.values import Value

_PLACES = frozenset(
    "run.name run.output_dir run.data_dir run.corpus tensorboard-dir save load data-cache-path save-interval"
    " num-workers log-interval tensorboard-log-interval wandb-project wandb-exp-name wandb-save-dir"
    " wandb-entity".split()
)
"""Settings that say where things lie or how often they are written; they change no result."""

_DATA = frozenset(
    "valid-data-path test-data-path split seq-length global-batch-size rampup-batch-size eval-iters tokenizer-type"
    " tokenizer-model vocab-file vocab-size merge-file".split()
).union(DATA_SOURCES)
"""Settings that decide which tokens a step, or the validation, sees."""

CORPUS = "corpus sha256"


@dataclass(frozen=True)
class Arm:
    """Runs with the same settings apart from the seed.

    Attributes:
        name: Of its first run, and how many seeds there are.
        runs: At least one; no two of them with the same seed.
    """

    name: str
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> list[Value]:
        """The seed of each run."""
        return [(run.settings or {}).get("seed") for run in self.runs]


def arms(runs: Sequence[Run]) -> list[Arm]:
    """Put runs that differ only in their seed together.

    Args:
        runs: All runs.

    Returns:
        Arms in the order of their first runs. Runs without known settings stand alone; a second run with the same
        settings and seed is no other seed, and begins another arm.
    """
    groups: dict[object, list[Run]] = {}
    for index, run in enumerate(runs):
        key: object = index
        if run.settings is not None:
            known = comparable_settings(run)
            seed = known.pop("seed", None)
            repeat = 0
            same = tuple(sorted((name, repr(value)) for name, value in known.items()))
            while any((other.settings or {}).get("seed") == seed for other in groups.get((same, repeat), [])):
                repeat += 1
            key = (same, repeat)
        groups.setdefault(key, []).append(run)
    return [
        Arm(group[0].name + (f" ({len(group)} seeds)" if len(group) > 1 else ""), tuple(group))
        for group in groups.values()
    ]


def baseline(all_arms: Sequence[Arm], run: Run | None = None) -> Arm:
    """Return the arm that holds ``run``; without one the first arm without LoCo, or else the first arm."""
    if run is not None:
        return next(arm for arm in all_arms if any(member is run for member in arm.runs))
    return next((arm for arm in all_arms if not arm.runs[0].has_loco), all_arms[0])


def comparable_settings(run: Run) -> dict[str, Value]:
    """Settings that can change the result, with the checksum of the corpus in place of its path where it is known."""
    known = {key: value for key, value in (run.settings or {}).items() if key not in _PLACES}
    if run.corpus is not None:
        known = {key: value for key, value in known.items() if key not in DATA_SOURCES} | {CORPUS: run.corpus}
    return known


def differences(run: Run, base: Run) -> dict[str, tuple[Value, Value]]:
    """Return the settings, other than the seed, in which two runs differ: value of ``run``, value of ``base``.

    Empty if the settings of one of them are not known. Fields of LoCo are left out where one of the two has LoCo off.
    """
    if run.settings is None or base.settings is None:
        return {}
    mine, other = comparable_settings(run), comparable_settings(base)
    both_on = run.has_loco and base.has_loco
    return {
        key: (mine.get(key), other.get(key))
        for key in sorted(mine.keys() | other.keys())
        if key != "seed" and mine.get(key) != other.get(key)
        if both_on or not key.startswith("loco.") or key == "loco.bits"
    }


def other_data(run: Run, base: Run) -> list[str]:
    """Return the settings that say that two runs saw other data."""
    return [key for key in differences(run, base) if key in _DATA or key == CORPUS]


def notes_on_run(run: Run) -> list[str]:
    """What a reader of a run's figures has to know."""
    notes = []
    if run.not_finite is not None:
        notes.append(f"its loss is NaN or infinite at iteration {run.not_finite}")
    if run.missing_iterations:
        total = run.last_iteration + run.missing_iterations
        notes.append(f"unfinished: its log ends at iteration {run.last_iteration} of {total}")
    if run.restarts:
        again = ", ".join(map(str, run.restarts))
        notes.append(f"restarted at iteration {again}: of what was logged twice, the later counts")
    if run.settings is None:
        notes.append("no resolved.yaml: seed, data and settings are not known, and not compared")
    if not run.scalars.get(VALIDATION_LOSS):
        notes.append("logged no validation loss (eval-interval)")
    return notes


def notes_on_pair(arm: Arm, base: Arm) -> list[str]:
    """What limits the comparison of an arm with the baseline."""
    run, other = arm.runs[0], base.runs[0]
    notes = []
    lengths = [{member.last_iteration for member in runs} for runs in (arm.runs, base.runs)]
    if max(lengths[0]) != max(lengths[1]) or max(map(len, lengths)) > 1:
        shortest = min(min(of_arm) for of_arm in lengths)
        notes.append(f"runs of different length: losses are compared up to iteration {shortest}")
    data = other_data(run, other)
    if data:
        notes.append(f"other data than the baseline ({', '.join(data)}): the losses are not judged")
    settings = [key for key in differences(run, other) if key not in data and not key.startswith("loco.")]
    if settings:
        notes.append(f"differs from the baseline not only in LoCo: {', '.join(settings)}")
    if run.settings is not None and other.settings is not None and set(arm.seeds).isdisjoint(base.seeds):
        notes.append("no seed in common with the baseline: other initial weights and order of data")
    return notes
