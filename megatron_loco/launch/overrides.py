"""``KEY=VALUE`` words of the command line, which win over the file."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_loco.launch.sections import MEGATRON_SECTIONS, SECTIONS, canonical, nearest
from megatron_loco.launch.values import Document, Setting
from megatron_loco.launch.yaml_file import parse_value

COMMAND_LINE = "command line"


def apply(document: Document, words: Iterable[str]) -> Document:
    """Return the document with the overrides in it.

    A Megatron flag is unique, so its section is optional and it replaces the value wherever the file has it; one that
    the file does not have is added to the named section, or to ``training``. Of two overrides of one key the later
    wins.

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
    return result
