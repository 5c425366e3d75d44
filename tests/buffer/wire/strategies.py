"""Draws any message type, from its declaration: a new message is tested without being listed anywhere."""

from typing import Any

import msgspec
from hypothesis import strategies as st

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.weights import protocol as w

MESSAGES: list[type[m.Message]] = sorted(
    (kind for module in (m, w) for kind in vars(module).values() if isinstance(kind, type)
     and issubclass(kind, m.Message) and kind is not m.Message),
    key=lambda kind: kind.__name__,
)  # fmt: skip

Kind = msgspec.inspect.Type
CHARACTERS = 'a1 \0\n"\u00e4\u20ac\uffff\U0001f600'
"""Of one to four bytes; drawing from all would first build tables for ten seconds."""


def message(kind: type[m.Message]) -> st.SearchStrategy[Any]:
    """Any message of this type, of the present schema version."""
    return _struct(msgspec.inspect.type_info(kind), v=st.just(m.SCHEMA_VERSION))


def _struct(kind: Kind, **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    assert isinstance(kind, msgspec.inspect.StructType)
    return st.builds(kind.cls, **{field.name: _value(field.type) for field in kind.fields} | given)


def _value(kind: Kind) -> st.SearchStrategy[Any]:  # noqa: PLR0911  (one line for each kind of field)
    match kind:
        case msgspec.inspect.StructType():
            return _struct(kind)
        case msgspec.inspect.IntType():
            low = -(1 << 63) if kind.ge is None else int(kind.ge)
            high = (1 << 64) - 1 if kind.lt is None else int(kind.lt) - 1
            return st.integers(low, high)
        case msgspec.inspect.FloatType():
            return st.floats(kind.ge, kind.le, allow_nan=False)
        case msgspec.inspect.StrType():
            return st.text(CHARACTERS, min_size=kind.min_length or 0, max_size=20)
        case msgspec.inspect.BytesType():
            return st.binary(max_size=40)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.ListType():
            return st.lists(_value(kind.item_type), max_size=3)
        case msgspec.inspect.LiteralType():
            return st.sampled_from(kind.values)
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.UnionType():
            return st.one_of(*(_value(each) for each in kind.types))
        case msgspec.inspect.DictType():
            return st.dictionaries(_value(kind.key_type), _value(kind.value_type), max_size=3)
        case _:
            raise NotImplementedError(f"draw {kind}")
