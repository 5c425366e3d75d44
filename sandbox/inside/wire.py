"""Bytes of plain values, between two processes of which either may be hostile: decoding runs no code of the sender.

Only a value whose type is exactly a plain one has bytes of its own, so no overridden method crosses. What is anything
else is up to the `describe` and `resolve` of the caller.
"""

from __future__ import annotations

import struct
import sys

TYPE_CHECKING = False  # typing and collections.abc take as long to import as Python to start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Final

    Describe = Callable[[Any], tuple[Any, ...]]
    """Plain fields that stand for a value that is not plain."""
    Resolve = Callable[..., Any]
    """The value of such fields."""

_COUNT: Final = struct.Struct("<I")
_FLOAT: Final = struct.Struct("<d")
_CONSTANTS: Final = {b"N": None, b"T": True, b"F": False, b"E": Ellipsis, b"I": NotImplemented}
_CONSTANT_TAGS: Final = {type(value): tag for tag, value in _CONSTANTS.items() if type(value) is not bool}
_CONTAINERS: Final = {
    ("builtins", "list"),
    ("builtins", "dict"),
    ("builtins", "set"),
    ("builtins", "bytearray"),
    ("collections", "deque"),
    ("collections", "Counter"),
    ("collections", "OrderedDict"),
}
_BY_ARGUMENTS: Final[dict[tuple[str, str], Callable[[Any], Any]]] = {
    ("builtins", "frozenset"): lambda value: (tuple(value),),
    ("builtins", "complex"): lambda value: (value.real, value.imag),
    ("builtins", "range"): lambda value: (value.start, value.stop, value.step),
    ("builtins", "slice"): lambda value: (value.start, value.stop, value.step),
    ("fractions", "Fraction"): lambda value: (value.numerator, value.denominator),
    ("decimal", "Decimal"): lambda value: (str(value),),
    ("datetime", "date"): lambda value: (value.year, value.month, value.day),
    ("datetime", "timedelta"): lambda value: (value.days, value.seconds, value.microseconds),
    ("datetime", "time"): lambda value: None if value.tzinfo else _clock(value),
    ("datetime", "datetime"): lambda value: (
        None if value.tzinfo else (value.year, value.month, value.day, *_clock(value))
    ),
}
"""Constructor arguments of an immutable value by its type; None if they don't describe it."""


class WireError(Exception):
    """Bytes that are no value."""


class Containers:
    """The mutable containers of one request and its reply, numbered in the order in which they first appear."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._before: list[list[Any]] = []

    def add(self, container: Any) -> None:
        self._numbers[id(container)] = len(self.objects)
        self.objects.append(container)

    def number(self, container: Any) -> int | None:
        return self._numbers.get(id(container))

    def remember(self) -> None:
        """Later changes are those since now."""
        self._before = [items(container) for container in self.objects]

    def changes(self) -> tuple[tuple[int, tuple[Any, ...]], ...]:
        """Numbers and present items of the containers that have changed."""
        pairs = ((number, before, items(self.objects[number])) for number, before in enumerate(self._before))
        return tuple((number, tuple(now)) for number, before, now in pairs if not _same(before, now))

    def apply(self, changes: Any) -> None:
        """Makes the changes of the other side. Raises: WireError."""
        try:
            for number, now in changes:
                refill(self.objects[number], now)
        except (TypeError, ValueError, IndexError, AttributeError) as error:
            raise WireError(str(error)) from None


def items(container: Any) -> list[Any]:
    """The elements of a container; of a mapping, keys and values in turn."""
    if isinstance(container, dict):
        return [item for pair in container.items() for item in pair]
    return [bytes(container)] if isinstance(container, bytearray) else list(container)


def refill(container: Any, now: Any) -> None:
    """Replaces what a container holds by the result of `items`."""
    if isinstance(container, bytearray):
        container[:] = now[0]
    elif isinstance(container, list):
        container[:] = now
    elif isinstance(container, dict):
        container.clear()
        for key, value in zip(now[::2], now[1::2]):  # noqa: B905 - Python 3.9 has no `strict`
            container[key] = value
    else:
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(now)


def encode(value: Any, containers: Containers, describe: Describe) -> bytes:
    """The bytes of a value."""
    parts: list[bytes] = []
    _put(value, parts, containers, describe)
    return b"".join(parts)


def _put(value: Any, parts: list[bytes], containers: Containers, describe: Describe) -> None:
    kind = type(value)
    if kind is int:
        _put_bytes(b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True), parts)
    elif kind is str:
        _put_bytes(b"s", value.encode("utf-8", "surrogatepass"), parts)
    elif kind is float:
        parts.append(b"f" + _FLOAT.pack(value))
    elif kind is bool:
        parts.append(b"T" if value else b"F")
    elif kind is bytes:
        _put_bytes(b"b", value, parts)
    elif kind is tuple:
        parts.append(b"t" + _COUNT.pack(len(value)))
        for item in value:
            _put(item, parts, containers, describe)
    elif kind in _CONSTANT_TAGS:
        parts.append(_CONSTANT_TAGS[kind])
    else:
        _put_object(value, parts, containers, describe)


def _put_object(value: Any, parts: list[bytes], containers: Containers, describe: Describe) -> None:
    name = _name(type(value))
    if name in _CONTAINERS:
        number = containers.number(value)
        if number is not None:
            parts.append(b"m" + _COUNT.pack(number))
            return
        containers.add(value)
        parts.append(b"c")
        _put((*name, getattr(value, "maxlen", None)), parts, containers, describe)
        _put(tuple(items(value)), parts, containers, describe)
        return
    arguments = _BY_ARGUMENTS[name](value) if name in _BY_ARGUMENTS else None
    parts.append(b"@" if arguments is None else b"v")
    _put(describe(value) if arguments is None else (*name, arguments), parts, containers, describe)


def _put_bytes(tag: bytes, raw: bytes, parts: list[bytes]) -> None:
    parts.append(tag + _COUNT.pack(len(raw)))
    parts.append(raw)


def _name(kind: type) -> tuple[str, str]:
    """Module and name of a type that is found there, which a class of the same names is not."""
    module, name = type.__getattribute__(kind, "__module__"), type.__getattribute__(kind, "__name__")
    if type(module) is str and getattr(sys.modules.get(module), name, None) is kind:
        return module, name
    return "", ""


class Decoder:
    """Reads the value that a message holds. Raises: WireError, and MemoryError or RecursionError for huge ones."""

    def __init__(self, message: bytes, containers: Containers, resolve: Resolve) -> None:
        self._message, self._at = message, 0
        self._containers, self._resolve = containers, resolve

    def value(self) -> Any:
        """The next value."""
        tag = self._take(1)
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag == b"f":
            return _FLOAT.unpack(self._take(8))[0]
        if tag == b"t":
            count = self._count()
            if count > len(self._message):
                raise WireError(f"a tuple of {count} items in {len(self._message)} bytes")
            return tuple([self.value() for _ in range(count)])
        return self._bytes(tag) if tag in b"isb" else self._object(tag)

    def _bytes(self, tag: bytes) -> Any:
        raw = self._take(self._count())
        if tag == b"i":
            return int.from_bytes(raw, "little", signed=True)
        try:
            return raw.decode("utf-8", "surrogatepass") if tag == b"s" else raw
        except UnicodeDecodeError as error:
            raise WireError(str(error)) from None

    def _object(self, tag: bytes) -> Any:
        try:
            if tag == b"m":
                return self._containers.objects[self._count()]
            if tag == b"c":
                return self._container()
            fields = self.value()
            if tag == b"v" and (fields[0], fields[1]) in _BY_ARGUMENTS:
                return _find(fields[0], fields[1])(*fields[2])
            if tag == b"@":
                return self._resolve(*fields)
        except (TypeError, ValueError, IndexError, KeyError, ArithmeticError) as error:
            raise WireError(str(error)) from None
        raise WireError(f"an unknown tag {tag!r}")

    def _container(self) -> Any:
        """A container is known before its items are read: it may hold itself."""
        module, name, limit = self.value()
        if (module, name) not in _CONTAINERS:
            raise WireError(f"an unknown container {module}.{name}")
        container = _find(module, name)() if name != "deque" else _find(module, name)(maxlen=limit)
        self._containers.add(container)
        refill(container, self.value())
        return container

    def _count(self) -> int:
        count: int = _COUNT.unpack(self._take(4))[0]
        return count

    def _take(self, size: int) -> bytes:
        taken = self._message[self._at : self._at + size]
        if len(taken) != size:
            raise WireError("the message ends within a value")
        self._at += size
        return taken


def _find(module: str, name: str) -> Any:
    __import__(module)  # a builtin or one of the standard library, by the tables above
    return getattr(sys.modules[module], name)


def _clock(value: Any) -> tuple[int, ...]:
    return value.hour, value.minute, value.second, value.microsecond


def _same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(
        first is second or (type(first) is bytes and first == second)
        for first, second in zip(before, now)  # noqa: B905 - Python 3.9 has no `strict`
    )
