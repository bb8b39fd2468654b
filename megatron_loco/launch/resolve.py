"""From a document to everything a run needs: own settings, the launcher's defaults, and Megatron's arguments."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_loco.config import LoCoConfig
from megatron_loco.launch import baseline, loco_section, yaml_file
from megatron_loco.launch.corpus import CORPORA, PreparedCorpus
from megatron_loco.launch.megatron_flags import MegatronFlags
from megatron_loco.launch.overrides import DEFAULT_FOLDERS
from megatron_loco.launch.run_config import RunConfig
from megatron_loco.launch.sections import MEGATRON_SECTIONS, nearest
from megatron_loco.launch.values import Document, Setting, Value, describe, located

DEFAULT = "launcher default"

REQUIRED = "???"
"""In a file: a value that every user has to set."""

_UNSET = Setting(None, "")

DATA_SOURCES = ("data-path", "train-data-path", "data-args-path", "per-split-data-args-path", "mock-data")
"""Flags that say where training data come from; with ``run.corpus`` they would contradict it."""

SCRIPT_FLAGS = {"data_format": "--data-format", "freeze": "--freeze-params"}
"""Settings of ``run`` that are flags of our own training script (see ``post_training``)."""


@dataclass(frozen=True, kw_only=True)
class OwnSections:
    """The sections that are not Megatron's: ``run``, ``env`` and ``loco``."""

    run: RunConfig
    env: dict[str, Value]
    loco: LoCoConfig | None

    @classmethod
    def read(cls, document: Document, *, config_file: str) -> OwnSections:
        """Check the sections that need no Megatron.

        Args:
            document: The file with its overrides.
            config_file: Its path, for messages and for the default name of the run.

        Returns:
            The settings.

        Raises:
            ValueError: a key is unknown or a value is not allowed; the message names file, line and key.
        """
        run = RunConfig.from_section(document.get("run", {}), config_file=config_file)
        if run.corpus is not None and run.corpus not in CORPORA:
            problem = f"unknown corpus {run.corpus!r}{nearest(run.corpus, CORPORA)} (known: {', '.join(CORPORA)})"
            raise located(document["run"]["corpus"].where, "run.corpus", problem)
        if run.corpus is not None and run.data_format not in ("text", CORPORA[run.corpus]):
            problem = f"run.corpus is {run.corpus}, which holds {CORPORA[run.corpus]}; leave the key out"
            raise located(document["run"]["data_format"].where, "run.data_format", problem)
        env: dict[str, Value] = {}
        for key, setting in document.get("env", {}).items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
                raise located(setting.where, f"env.{key}", "is not the name of an environment variable")
            if isinstance(setting.value, bool) or not isinstance(setting.value, int | float | str):
                hint = "; put quotes round it" if isinstance(setting.value, bool) else ""
                problem = f"takes text or a number, got {describe(setting.value)}{hint}"
                raise located(setting.where, f"env.{key}", problem)
            env[key] = setting.value
        document = baseline.switch_loco_off(document, run)
        return cls(run=run, env=env, loco=loco_section.from_section(document.get("loco", {})))

    def environment(self) -> dict[str, str]:
        """The ``env`` section as text."""
        return {key: str(value) for key, value in self.env.items()}


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A configuration with nothing left to guess.

    Attributes:
        sections: All sections with the launcher's defaults in them; as YAML they load to the same run.
        megatron_argv: Megatron's own arguments.
        argv: Those, LoCo's, and those that only our own training script knows.
    """

    sections: dict[str, dict[str, Value]]
    megatron_argv: list[str]
    argv: list[str]

    def as_yaml(self, *, comment: str = "") -> str:
        """The configuration as a file that the launcher loads."""
        return yaml_file.dump(self.sections, comment=comment)


def resolve(document: Document, own: OwnSections, flags: MegatronFlags, corpus: PreparedCorpus | None) -> Resolved:
    """Add the launcher's defaults and build the arguments.

    Args:
        document: The file with its overrides.
        own: Its ``run``, ``env`` and ``loco`` sections, with ``run.device`` settled.
        flags: Megatron's flags.
        corpus: The prepared corpus that ``run.corpus`` asks for, or ``None``: not prepared yet, or none asked for.

    Returns:
        The resolved configuration. With a prepared corpus it names the data by path, and ``run.corpus`` is null; before
        that, the arguments hold a placeholder.

    Raises:
        ValueError: a value is missing, or a flag is unknown, has a wrong value or contradicts a setting of ``run``.
    """
    _refuse_missing(document)
    flags.argv(document)  # mistakes in the file come first, before anything is added to it
    megatron = {name: dict(document[name]) for name in document if name in MEGATRON_SECTIONS}
    baseline.add_gradient_type(document, megatron, own.run)
    _add_defaults(megatron, own.run)
    if own.run.corpus is not None:
        _add_corpus(megatron, own.run, corpus)
    argv = flags.argv(megatron)
    if own.run.corpus is not None and corpus is None:  # paths that are not known yet are for Megatron's checks only
        for key in ("data-path", "data-cache-path"):
            if megatron["data"].get(key, _UNSET).where == DEFAULT:
                del megatron["data"][key]
    run = own.run
    if run.corpus is not None:
        run = dataclasses.replace(run, data_format=CORPORA[run.corpus])
    script_argv = _script_argv(run, own.environment(), megatron)
    if corpus is not None:
        run = dataclasses.replace(run, corpus=None)
    sections: dict[str, dict[str, Value]] = {
        "run": dataclasses.asdict(run),
        "env": dict(own.env),
        "loco": loco_section.as_values(own.loco),
        **{name: {key: s.value for key, s in section.items()} for name, section in megatron.items()},
    }
    return Resolved(sections=sections, megatron_argv=argv, argv=[*argv, *loco_section.as_argv(own.loco), *script_argv])


def _refuse_missing(document: Document) -> None:
    missing = {
        f"{section}.{key}": setting.where
        for section, settings in document.items()
        for key, setting in settings.items()
        if REQUIRED in (setting.value if isinstance(setting.value, list) else [setting.value])
    }
    if missing:
        (first, where), *others = missing.items()
        rest = "".join(f", and {name} ({place})" for name, place in others)
        example = " ".join(f"{name}=VALUE" for name in missing)
        raise ValueError(f"{where}: {first} is for you to set{rest}: in the file, or by {example} on the command line")


def _script_argv(run: RunConfig, environment: Mapping[str, str], megatron: Document) -> list[str]:
    asked = {"data_format": run.data_format if run.data_format != "text" else None, "freeze": run.freeze}
    words = [word for key, flag in SCRIPT_FLAGS.items() if asked[key] is not None for word in (flag, str(asked[key]))]
    if words and (os.environ | environment).get("MEGATRON_LM_DIR"):
        names = ", ".join(f"run.{key}" for key, value in asked.items() if value is not None)
        raise ValueError(f"{names}: only our own training script has it; unset MEGATRON_LM_DIR")
    mock = _find(megatron, "mock-data")
    if run.data_format == "chat" and mock is not None and mock.value:
        raise located(mock.where, _name(megatron, "mock-data"), "run.data_format is chat; made-up data have no roles")
    return words


def _add_defaults(megatron: Document, run: RunConfig) -> None:
    defaults: list[tuple[str, str, Value]] = [
        ("logging", "tensorboard-dir", f"{run.output_dir}/{DEFAULT_FOLDERS['tensorboard-dir']}"),
        ("checkpoint", "save", f"{run.output_dir}/{DEFAULT_FOLDERS['save']}"),
    ]
    train_iters = _find(megatron, "train-iters")
    save = _find(megatron, "save")
    if train_iters is not None and (save is None or save.value is not None):
        # Megatron refuses --save without an interval; its last iteration is saved in any case
        defaults.append(("checkpoint", "save-interval", train_iters.value))
    if run.device == "cpu":
        backend = _find(megatron, "distributed-backend")
        if backend is not None and backend.value != "gloo":
            problem = "run.device is cpu, which needs gloo; leave the key out, the launcher sets it"
            raise located(backend.where, _name(megatron, "distributed-backend"), problem)
        defaults.append(("parallel", "distributed-backend", "gloo"))
    for section, key, value in defaults:
        if _find(megatron, key) is None:
            megatron.setdefault(section, {})[key] = Setting(value, DEFAULT)


def _add_corpus(megatron: Document, run: RunConfig, corpus: PreparedCorpus | None) -> None:
    for key in DATA_SOURCES:
        setting = _find(megatron, key)
        if setting is not None and setting.value not in (None, False):
            problem = f"run.corpus is {run.corpus} and supplies the data; set one of the two (run.corpus=null)"
            raise located(setting.where, _name(megatron, key), problem)
    for key, value in _corpus_settings(run, corpus).items():
        setting = _find(megatron, key)
        if setting is None or setting.value is None:
            for section in megatron.values():
                section.pop(key, None)
            megatron.setdefault("data", {})[key] = Setting(value, DEFAULT)
        elif key != "data-cache-path" and setting.value != value:
            problem = f"run.corpus {run.corpus} holds bytes and needs {value!r}; leave the key out"
            raise located(setting.where, _name(megatron, key), problem)


def _corpus_settings(run: RunConfig, corpus: PreparedCorpus | None) -> Mapping[str, Value]:
    if corpus is not None:
        return corpus.megatron_settings()
    assert run.corpus is not None
    return PreparedCorpus.unprepared(run.corpus, run.data_dir).megatron_settings()


def _find(megatron: Document, key: str) -> Setting | None:
    return next((section[key] for section in megatron.values() if key in section), None)


def _name(megatron: Document, key: str) -> str:
    return next(f"{name}.{key}" for name, section in megatron.items() if key in section)
