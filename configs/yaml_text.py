"""YAML as configurations are written in it: no key twice in one mapping, and `1e-3` is a number, as in YAML 1.2."""

import re
from typing import Any

import yaml

from slipstream.configs.errors import SlipstreamError

# YAML 1.1 wants a point and a sign: 1.0e-3. So a learning rate of 1e-3 would be a text where no schema says better.
_EXPONENT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")


class YamlError(SlipstreamError):
    """A text that can't be read; the message says why.

    Attributes:
        line: where, counted from 1; None if that isn't known.
    """

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.line = line


def read_yaml(text: str) -> Any:
    """What a YAML text says. Raises: YamlError when it is none, or gives a key twice."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise YamlError(f"not valid YAML: {error.problem}", None if mark is None else mark.line + 1) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that no calendar has
        raise YamlError(f"not valid YAML: {error}") from None


def write_yaml(value: Any) -> str:
    """A text that `read_yaml` reads back to the same value."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


class _Loader(yaml.SafeLoader):
    """Keys are compared before `<<` brings others in: those may be given once more, and go behind."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        mapping: yaml.MappingNode = super().compose_mapping_node(anchor)
        first: dict[str, int] = {}
        for key, _ in mapping.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in first:
                raise YamlError(
                    f"the key {key.value!r} is given twice, first on line {first[key.value]}: keep one", line
                )
            first[key.value] = line
        return mapping


class _Dumper(yaml.SafeDumper):
    """Quotes a text that would be read as a number."""


for _way in (_Loader, _Dumper):
    _way.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))
