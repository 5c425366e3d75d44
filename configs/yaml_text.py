"""YAML as configurations are written in it: only what JSON can say too, no key twice, numbers as in YAML 1.2.

What JSON can't say would be another value for the processes that read a run's resolved configuration.
"""

import re
from typing import Any, ClassVar, Final

import yaml

from slipstream.configs.runtime.errors import SlipstreamError

# YAML 1.1 wants a point and a sign: 1.0e-3. So a learning rate of 1e-3 would be a text where no schema says better.
_EXPONENT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
_TAG: Final = "tag:yaml.org,2002:"
_OCTAL_OR_MINUTES: Final = re.compile(r"[-+]?0[0-7_]+|.*:.*")
"""What YAML 1.1 makes numbers of, but nobody means: `010` as 8, `1:30` as 90. Left as texts, a schema takes the first
as 10 and refuses the second."""
_TEXTS: Final = {f"{_TAG}timestamp", f"{_TAG}value"}
"""What YAML 1.1 makes of a bare `2026-01-31` and `=`, which are texts in YAML 1.2."""
_NOT_IN_JSON: Final = {f"{_TAG}{kind}" for kind in ("timestamp", "binary", "set", "omap", "pairs")}
MOST_LEVELS: Final = 50


class YamlError(SlipstreamError):
    """A text that can't be read; the message says why.

    Attributes:
        line: where, counted from 1; None if that isn't known.
    """

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.line = line


def read_yaml(text: str) -> Any:
    """What a YAML text says. Raises: YamlError when it is none, or says what a configuration can't hold."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise YamlError(f"not valid YAML: {error.problem}", None if mark is None else mark.line + 1) from None
    except yaml.reader.ReaderError as error:
        character = error.character if isinstance(error.character, int) else ord(error.character)
        raise YamlError(f"not valid YAML: the character #x{character:04x} is not allowed in it") from None
    except (ValueError, LookupError) as error:  # a tag that the value does not fit: !!int x, !!bool x
        raise YamlError(f"not valid YAML: {error}") from None


def write_yaml(value: Any) -> str:
    """A text that `read_yaml` reads back to the same value."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


class _Loader(yaml.SafeLoader):
    """Keys are compared before `<<` brings others in: those may be given once more, and go behind."""

    yaml_constructors: ClassVar = {
        tag: construct for tag, construct in yaml.SafeLoader.yaml_constructors.items() if tag not in _NOT_IN_JSON
    }

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._inside: list[Any] = []
        """The anchors, or None, of the mappings and lists around what is being read."""

    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: Any) -> str:
        tag: str = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        numbers = (f"{_TAG}int", f"{_TAG}float")
        return f"{_TAG}str" if tag in numbers and _OCTAL_OR_MINUTES.fullmatch(value or "") else tag

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        line = None if event.start_mark is None else event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) and event.anchor in self._inside:
            raise YamlError(f"*{event.anchor} stands inside of what it repeats", line)
        if len(self._inside) > MOST_LEVELS:
            raise YamlError(f"more than {MOST_LEVELS} mappings and lists stand inside each other", line)
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
                raise YamlError(f"{what} is no text; quote it", line)
            if key.value in first:
                raise YamlError(
                    f"the key {key.value!r} is given twice, first on line {first[key.value]}: keep one", line
                )
            first[key.value] = line
        return mapping


class _Dumper(yaml.SafeDumper):
    """Quotes a text that would be read as a number."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _TEXTS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _way in (_Loader, _Dumper):
    _way.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))
