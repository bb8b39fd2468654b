"""``KEY=VALUE`` words of the command line, which win over the file."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_loco.launch.sections import MEGATRON_SECTIONS, SECTIONS, canonical, nearest
from megatron_loco.launch.values import Document, Setting
from megatron_loco.launch.yaml_file import parse_value

COMMAND_LINE = "command line"

DEFAULT_FOLDERS = {"tensorboard-dir": "tensorboard", "save": "checkpoints"}
"""Megatron's settings that the launcher sets to a folder in ``run.output_dir``."""


def apply(document: Document, words: Iterable[str]) -> Document:
    """Return the document with the overrides in it.

    A Megatron flag is unique, so its section is optional and it replaces the value wherever the file has it; one that
    the file does not have is added to the named section, or to ``training``. Of two overrides of one key the later
    wins.

    A new ``run.name`` or ``run.output_dir`` takes along what the file derives from the old one, as ``resolved.yaml``
    does: a run that is repeated under another name must not write into the folders of the first.

    Args:
        document: The file.
        words: ``section.key=value`` or ``megatron-flag=value``; values follow the rules of the file.

    Returns:
        A new document.

    Raises:
        ValueError: a word has no ``=``, its section is unknown, or its value is not one of YAML's.
    """
    result = {section: dict(settings) for section, settings in document.items()}
    for word in words:
        key, equals, content = word.partition("=")
        if not equals or not key:
            raise ValueError(f"{COMMAND_LINE}: {word!r} is not KEY=VALUE, such as training.train-iters=20")
        section, dot, name = key.partition(".")
        if not dot:
            section, name = "training", key
        elif section not in SECTIONS:
            raise ValueError(f"{COMMAND_LINE}: {key}: unknown section {section}{nearest(section, SECTIONS)}")
        name = canonical(section, name)
        if section in MEGATRON_SECTIONS:
            section = next((s for s in MEGATRON_SECTIONS if name in result.get(s, {})), section)
        value = parse_value(content, f"{COMMAND_LINE}: {key}")
        result.setdefault(section, {})[name] = Setting(value, COMMAND_LINE)
    _follow(document, result)
    return result


def _follow(document: Document, result: Document) -> None:
    # Removes what is the launcher's default for the old name or folder, so that the new default takes its place.
    run, new_run = document.get("run", {}), result.get("run", {})
    if "output_dir" not in run:
        return
    folder = run["output_dir"]
    renamed = "name" in run and new_run["name"].value != run["name"].value
    if renamed and new_run["output_dir"] == folder and folder.value == f"runs/{run['name'].value}":
        del new_run["output_dir"]
    if "output_dir" in new_run and new_run["output_dir"].value == folder.value:
        return
    for section in MEGATRON_SECTIONS:
        for key, subfolder in DEFAULT_FOLDERS.items():
            default = Setting(f"{folder.value}/{subfolder}", document.get(section, {}).get(key, folder).where)
            if result.get(section, {}).get(key) == default:
                del result[section][key]
