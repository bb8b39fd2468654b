"""Strict YAML 1.2: sections of scalars and lists, each with its line; what could be misread is an error.

YAML 1.2 (ruamel.yaml) and not 1.1, so that ``1e-4`` is a number and ``on`` is text. The node tree is read, not the
loaded dictionaries, because only nodes know their lines and still hold keys that were given twice.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from megatron_loco.launch.sections import SECTIONS, canonical, nearest
from megatron_loco.launch.values import Document, Scalar, Setting, Value, located


def load(path: str | Path) -> Document:
    """Read a configuration file.

    Args:
        path: The YAML file.

    Returns:
        Its sections, in the order of the file; whether the keys mean anything is not checked here.

    Raises:
        ValueError: the file is missing, empty or not YAML, a section is unknown, a key is given twice, or a value is
            neither a scalar nor a list of scalars. The message names file, line and key.
    """
    try:
        content = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not a text file in UTF-8") from None
    root = _compose(content, str(path), is_file=True)
    if root is None or (isinstance(root, ScalarNode) and root.value == ""):
        raise ValueError(f"{path}: the file is empty; a configuration has sections such as model: and training:")
    if not isinstance(root, MappingNode):
        kind = "a list" if isinstance(root, SequenceNode) else "a single value"
        raise ValueError(f"{path}:{_line(root)}: the file holds {kind}; it must hold sections such as model:")
    document: Document = {}
    lines: dict[str, int] = {}
    for key_node, section_node in root.value:
        section, where = _key(key_node, str(path))
        if section not in SECTIONS:
            problem = f"unknown section{nearest(section, SECTIONS)} (sections: {', '.join(SECTIONS)})"
            raise located(where, section, problem)
        if section in document:
            raise located(where, section, f"the section is given twice, first on line {lines[section]}")
        lines[section] = _line(key_node)
        document[section] = _section(section, section_node, str(path))
    return document


def parse_value(content: str, where: str) -> Value:
    """Read one value written outside a file, by the rules of the file.

    Args:
        content: A YAML scalar, or a list ``[a, b]``.
        where: The place to name in errors.

    Returns:
        The value.

    Raises:
        ValueError: it is empty, no scalar or list of scalars, or ends in what YAML reads as a comment.
    """
    node = _compose(content, where, is_file=False)
    if node is None:
        raise ValueError(f"{where}: the value is empty; write null for the default")
    if node.end_mark.index < len(content.rstrip()):
        raise ValueError(f"{where}: YAML reads a comment in {content!r}; put quotes round the value")
    return _value(node, where)


def dump(sections: Mapping[str, Mapping[str, Value]], *, comment: str = "") -> str:
    """Write sections as YAML that :func:`load` reads back to the same values.

    Args:
        sections: Section -> key -> value; the order is kept.
        comment: Lines for the top of the file.

    Returns:
        The text of the file.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # declared by its first value, None
    yaml.allow_unicode = True
    yaml.width = 1 << 20  # no folding: one setting, one line
    out = io.StringIO()
    out.writelines(f"# {line}\n" for line in comment.splitlines())
    for name, section in sections.items():
        if section:
            yaml.dump({name: dict(section)}, out)
    return out.getvalue()


def _compose(content: str, source: str, *, is_file: bool) -> Node | None:
    try:
        node: Node | None = YAML(typ="safe", pure=True).compose(content)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None and is_file else ""
        if "\\t" in (error.problem or ""):
            raise ValueError(f"{source}{line}: a tab in YAML cannot indent or separate; use spaces") from None
        raise ValueError(f"{source}{line}: not valid YAML: {error.problem or error.context}") from None
    except YAMLError as error:
        raise ValueError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None
    return node


def _section(section: str, node: Node, path: str) -> dict[str, Setting]:
    if isinstance(node, ScalarNode) and str(node.tag).endswith(":null"):
        return {}  # a section with nothing under it, such as one whose keys are all commented out
    if not isinstance(node, MappingNode):
        raise located(f"{path}:{_line(node)}", section, "a section holds lines of 'key: value'")
    settings: dict[str, Setting] = {}
    written: dict[str, tuple[str, int]] = {}
    for key_node, value_node in node.value:
        key, where = _key(key_node, path)
        name = canonical(section, key)
        if name in settings:
            first, line = written[name]
            raise located(where, f"{section}.{key}", f"the key is given twice, first on line {line} as {first}")
        written[name] = (key, _line(key_node))
        settings[name] = Setting(_value(value_node, f"{where}: {section}.{key}"), where)
    return settings


def _key(node: Node, path: str) -> tuple[str, str]:
    where = f"{path}:{_line(node)}"
    if not isinstance(node, ScalarNode) or not node.value:
        raise ValueError(f"{where}: a key must be a name")
    return str(node.value), where


def _value(node: Node, where: str) -> Value:
    if isinstance(node, SequenceNode):
        return [_scalar(item, where) for item in node.value]
    return _scalar(node, where)


def _scalar(node: Node, where: str) -> Scalar:
    if not isinstance(node, ScalarNode):
        kind = "a list inside a list" if isinstance(node, SequenceNode) else "a group of keys"
        raise ValueError(f"{where}: expected one value or a list of values, got {kind}")
    try:
        value = YAML(typ="safe", pure=True).constructor.construct_object(node)
    except (YAMLError, ValueError):
        raise ValueError(f"{where}: cannot read {node.value!r} as {node.tag}") from None
    if value is not None and not isinstance(value, bool | int | float | str):
        raise ValueError(f"{where}: {node.value!r} is read as a {type(value).__name__}; put quotes round it")
    return value


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1
