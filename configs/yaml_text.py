"""The YAML of configurations: values that JSON has too, no repeated keys, numbers as in YAML 1.2.

Other values would change when the processes of a run read its resolved configuration.
"""

import re
from typing import Any, ClassVar, Final

import yaml

from slipstream.configs.runtime.errors import SlipstreamError

# YAML 1.1 requires a point and a sign, 1.0e-3: without a schema, a learning rate of 1e-3 would be a text.
_EXPONENT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
_TAG: Final = "tag:yaml.org,2002:"
_OCTAL_OR_SEXAGESIMAL: Final = re.compile(r"[-+]?0[0-7_]+|.*:.*")
"""Numbers in YAML 1.1 that nobody means: `010` as 8, `1:30` as 90. As texts, a schema reads the first as 10 and
refuses the second."""
_TEXTS: Final = {f"{_TAG}timestamp", f"{_TAG}value"}
"""Types in YAML 1.1 of a bare `2026-01-31` and `=`, which are texts in YAML 1.2."""
_NOT_IN_JSON: Final = {f"{_TAG}{kind}" for kind in ("timestamp", "binary", "set", "omap", "pairs")}
MAX_DEPTH: Final = 50


class YamlError(SlipstreamError):
    """A text that can't be read.

    Attributes:
        line: its line, from 1; None if unknown.
    """

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.line = line


def read_yaml(text: str) -> Any:
    """Parses a YAML text. Raises: YamlError when it is invalid, or holds values that a configuration can't."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise YamlError(f"not valid YAML: {error.problem}", None if mark is None else mark.line + 1) from None
    except yaml.reader.ReaderError as error:
        character = error.character if isinstance(error.character, int) else ord(error.character)
        raise YamlError(f"not valid YAML: the character #x{character:04x} is not allowed in it") from None
    except (ValueError, LookupError) as error:  # a tag that does not fit its value: !!int x, !!bool x
        raise YamlError(f"not valid YAML: {error}") from None


def write_yaml(value: Any) -> str:
    """A text that `read_yaml` reads back to the same value."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


class _Loader(yaml.SafeLoader):
    """Checks for repeated keys before `<<` is merged: a mapping may override merged keys."""

    yaml_constructors: ClassVar = {
        tag: construct for tag, construct in yaml.SafeLoader.yaml_constructors.items() if tag not in _NOT_IN_JSON
    }

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._inside: list[Any] = []
        """Anchors, or None, of the mappings and lists around the current node."""

    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: Any) -> str:
        tag: str = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        numbers = (f"{_TAG}int", f"{_TAG}float")
        return f"{_TAG}str" if tag in numbers and _OCTAL_OR_SEXAGESIMAL.fullmatch(value or "") else tag

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        line = None if event.start_mark is None else event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) and event.anchor in self._inside:
            raise YamlError(f"*{event.anchor} refers to the value that contains it", line)
        if len(self._inside) > MAX_DEPTH:
            raise YamlError(f"more than {MAX_DEPTH} nested mappings and lists", line)
        return super().compose_node(parent, index)

    def compose_sequence_node(self, anchor: Any) -> yaml.SequenceNode:
        self._inside.append(anchor)
        sequence: yaml.SequenceNode = super().compose_sequence_node(anchor)
        self._inside.pop()
        return sequence

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        self._inside.append(anchor)
        mapping: yaml.MappingNode = super().compose_mapping_node(anchor)
        self._inside.pop()
        first: dict[str, int] = {}
        for key, _ in mapping.value:
            line = key.start_mark.line + 1
            if key.tag not in (f"{_TAG}str", f"{_TAG}merge"):
                what = f"the key {key.value!r}" if isinstance(key, yaml.ScalarNode) else "a key"
                raise YamlError(f"{what} is not a text; quote it", line)
            if key.value in first:
                raise YamlError(f"the key {key.value!r} is repeated, first on line {first[key.value]}: keep one", line)
            first[key.value] = line
        return mapping


class _Dumper(yaml.SafeDumper):
    """Quotes texts that would be read as numbers."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _TEXTS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))
