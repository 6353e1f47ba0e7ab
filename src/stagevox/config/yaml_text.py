"""YAML as an operator means it: plain values, each with the line it stands on.

Scalars are read as in YAML 1.2, with yes, no, on and off as truth values besides: ``1e-3`` is a number, ``010`` and ``1:30`` are
none. Keys are always texts. What could be lost in silence is an error: a key that stands there twice, a tag, a second document.
Sizes, depth and the number of values are bounded, with aliases counted as often as they are used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from stagevox.errors import ConfigError

MAX_BYTES = 256 << 10
MAX_DEPTH = 24
MAX_VALUES = 10_000

Where = tuple[str | int, ...]
"""The keys and list positions that lead to a value."""

_TAG = "tag:yaml.org,2002:"
_TRUE = frozenset({"yes", "true", "on"})
_BOOL = re.compile(
    r"^(?:yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)$",
)
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*|0x[0-9a-fA-F]+|0o[0-7]+)$")
_WHOLE = r"(?:0|[1-9][0-9]*(?:_[0-9]+)*)"
_FLOAT = re.compile(rf"^(?:[-+]?(?:{_WHOLE}?\.[0-9]+|{_WHOLE}\.?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$")
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")


@dataclass(frozen=True, slots=True)
class Document:
    """What a YAML text says. ``lines`` has the line, from 1, of every key and list item."""

    name: str
    value: Any
    lines: dict[Where, int] = field(default_factory=dict)

    def line(self, where: Where) -> int:
        """The line of a value, or of the nearest thing around it that has one."""
        while where and where not in self.lines:
            where = where[:-1]
        return self.lines.get(where, 1)


def read_document(path: Path, field_name: str) -> Document:
    """Read a file; raises :class:`ConfigError` about ``field_name`` if it can't be read, or is no YAML that we take."""
    name = str(path) if str(path).isprintable() else repr(str(path))
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(field_name, f"can't read {name}: {reason}") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(field_name, f"{name} has more than {MAX_BYTES >> 10} KiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(field_name, f"{name} is not UTF-8: byte {error.start}") from None
    return parse_document(text, name, field_name)


def parse_document(text: str, name: str, field_name: str) -> Document:
    """Parse a text that the operator knows as ``name``; raises :class:`ConfigError`."""
    return _Reader(name, field_name).read(text)


def parse_value(text: str, field_name: str) -> Any:
    """Parse a value of the command line: a scalar, or a list or mapping in braces."""
    return _Reader("", field_name).read(text).value


def plain_scalar(text: str) -> Any:
    """What a text would be without quotes; a text that is null then stays a text."""
    if _BOOL.match(text):
        return text.lower() in _TRUE
    try:
        if _INT.match(text):
            return _integer(text)
        if _FLOAT.match(text):
            return _number(text)
    except ValueError:
        pass
    return text


def _integer(text: str) -> int:
    return int(text.replace("_", ""), 0)


def _number(text: str) -> float:
    text = text.replace("_", "").lower()
    return float(text.replace(".", "") if text.endswith(("inf", "nan")) else text)


class _Loader(yaml.SafeLoader):
    """Composes nodes with our scalars, and not too many within each other."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own way
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Upstream's, one deeper."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_DEPTH} levels deep", problem_mark=self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


for _kind, _pattern, _first in (
    ("bool", _BOOL, "yYnNtTfFoO"),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("null", _NULL, ["~", "n", "N", ""]),
    ("merge", re.compile(r"^<<$"), "<"),
):
    _Loader.add_implicit_resolver(_TAG + _kind, _pattern, list(_first))


class _Reader:
    """Turns one text into a document."""

    def __init__(self, name: str, field_name: str) -> None:
        self._name = name
        self._field = field_name
        self._lines: dict[Where, int] = {}
        self._count = 0
        self._open: set[int] = set()

    def read(self, text: str) -> Document:
        """Compose, then convert."""
        try:
            loader = _Loader(text)
            try:
                node = loader.get_single_node()
            finally:
                loader.dispose()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            self._fail(mark.line + 1 if mark else 1, error.problem or error.context or "not YAML")
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            self._fail(line, f"the character U+{error.character:04X} is not allowed")
        except (ValueError, OverflowError) as error:  # such as an escape that names no character
            self._fail(None, f"not YAML: {error}")
        value = None if node is None else self._convert(node, ())
        return Document(self._name, value, self._lines)

    def _convert(self, node: yaml.Node, where: Where) -> Any:
        self._count += 1
        if self._count > MAX_VALUES:
            self._fail(None, f"more than {MAX_VALUES} values; an alias counts as often as it is used")
        if id(node) in self._open:
            self._fail(node.start_mark.line + 1, "an alias inside of what it stands for")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        self._open.add(id(node))
        value: Any
        if isinstance(node, yaml.SequenceNode):
            self._check_tag(node, "seq")
            value = []
            for index, item in enumerate(node.value):
                self._lines[(*where, index)] = item.start_mark.line + 1
                value.append(self._convert(item, (*where, index)))
        else:
            self._check_tag(node, "map")
            value = self._mapping(node, where)
        self._open.discard(id(node))
        return value

    def _mapping(self, node: yaml.Node, where: Where) -> dict[str, Any]:
        """A mapping; what it merges (``<<``) comes first and gives way to its own keys."""
        value: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._fail(line, "a key must be a text")
            key = key_node.value
            if key in own:
                self._fail(line, f"{key!r} stands there twice, first in line {own[key].start_mark.line + 1}")
            own[key] = key_node
            if key_node.tag == _TAG + "merge":
                for merged in reversed(list(self._merged(value_node))):  # the first one wins, with its lines
                    value |= self._convert(merged, where)
        for key_node, value_node in node.value:
            if key_node.tag != _TAG + "merge":
                self._lines[(*where, key_node.value)] = key_node.start_mark.line + 1
                value[key_node.value] = self._convert(value_node, (*where, key_node.value))
        return value

    def _merged(self, node: yaml.Node) -> Iterator[yaml.Node]:
        for part in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(part, yaml.MappingNode):
                self._fail(part.start_mark.line + 1, "<< merges mappings only")
            yield part

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        kind, text = node.tag.removeprefix(_TAG), node.value
        try:
            match kind:
                case "str" | "merge":
                    return text
                case "null":
                    return None
                case "bool" if _BOOL.match(text):
                    return text.lower() in _TRUE
                case "int" if _INT.match(text):
                    return _integer(text)
                case "float" if _FLOAT.match(text) or _INT.match(text):
                    return _number(text)
                case "bool" | "int" | "float":
                    self._fail(node.start_mark.line + 1, f"not a value of type {kind}: {text!r}")
        except ValueError:  # an integer of thousands of digits
            self._fail(node.start_mark.line + 1, "a number with too many digits")
        self._refuse_tag(node)

    def _check_tag(self, node: yaml.Node, kind: str) -> None:
        if node.tag != _TAG + kind:
            self._refuse_tag(node)

    def _refuse_tag(self, node: yaml.Node) -> NoReturn:
        self._fail(node.start_mark.line + 1, f"the tag {node.tag.replace(_TAG, '!!')} is not taken")

    def _fail(self, line: int | None, message: str) -> NoReturn:
        where = ", ".join(part for part in (self._name, f"line {line}" if self._name and line else "") if part)
        message = message if len(message) <= 300 else f"{message[:300]}..."
        raise ConfigError(self._field, f"{where}: {message}" if where else message)
