"""Calls between two processes over a socket: an object stays with its owner, the other side holds a `Remote` of it.

Arguments and results that are plain cross by value; containers that a call has changed are changed for its caller too.
"""

from __future__ import annotations

import _operator
import builtins
import os
import struct

from slipstream.sandbox.inside.wire import Containers, Decoder, WireError, encode

TYPE_CHECKING = False  # typing and collections.abc take as long to import as Python to start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Final

_LENGTH: Final = struct.Struct("<I")
_AS_PLAIN: Final[dict[Any, Callable[[Any], Any]]] = {
    int: int.__int__,
    float: float.__float__,
    complex: lambda value: complex(value.real, value.imag),
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    tuple: lambda value: tuple.__getitem__(value, slice(None)),
    list: list.copy,
    dict: dict.copy,
    **{kind: kind for kind in (set, frozenset, bytearray)},
}
"""From an instance of a plain type's subclass to the plain value."""
_TYPES: Final = {
    name: value
    for name, value in vars(builtins).items()
    if isinstance(value, type) and (issubclass(value, BaseException) or value in (*_AS_PLAIN, bool, object))
}
"""Builtin types that cross by name."""
_ATTRIBUTES: Final = frozenset({"__name__", "__qualname__", "__doc__", "__dict__", "__annotations__"})
"""The special attributes that a `Remote` reads from its object; libraries would trust others, such as numpy's."""
UNARY: Final[dict[str, Callable[..., Any]]] = {
    **{f"__{name}__": getattr(_operator, name) for name in ("neg", "pos", "abs", "invert", "index")},
    "__len__": len,
    "__iter__": iter,
    "__next__": next,
    "__reversed__": reversed,
    "__bool__": bool,
    "__str__": str,
    "__repr__": repr,
    "__hash__": hash,
    "__int__": int,
    "__float__": float,
    "__complex__": complex,
    "__round__": round,
    "__format__": format,
    "__enter__": lambda value: type(value).__enter__(value),
    "__exit__": lambda value, *error: type(value).__exit__(value, *error),
    "__getitem__": _operator.getitem,
    "__setitem__": _operator.setitem,
    "__delitem__": _operator.delitem,
    "__setattr__": setattr,
    "__delattr__": delattr,
    "__call__": lambda value, *args, **named: value(*args, **named),
    "__instancecheck__": lambda kind, value: isinstance(value, kind),
    "__subclasscheck__": lambda kind, value: issubclass(value, kind),
}
"""Operations of an object, by the method of a `Remote`."""
COMPARISONS: Final = {f"__{name}__": getattr(_operator, name) for name in ("eq", "lt", "le", "gt", "ge")}
ARITHMETIC: Final = {
    **{
        f"__{name.rstrip('_')}__": getattr(_operator, name)
        for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor")
    },
    "__lshift__": _operator.lshift,
    "__rshift__": _operator.rshift,
    "__divmod__": divmod,
}
OPERATIONS: Final[dict[str, Callable[..., Any]]] = {
    **UNARY,
    **COMPARISONS,
    **ARITHMETIC,
    "getattr": getattr,
    "plain": lambda value: _AS_PLAIN[_base(value)](value),
    "compares": lambda value: bool(type(value).__eq__ is not object.__eq__),  # type: ignore[comparison-overlap]
}


class Closed(BaseException):
    """The other process has ended, or has closed the socket."""


class Refused(BaseException):
    """An operation that a judge does not perform. No `Exception`, so that checks don't catch it."""


class Remote:
    """An object of the other process. Its operations are carried out there."""

    __slots__ = ("_remote_base", "_remote_number", "_remote_peer")
    _remote_base: str  # name of the plain type that its type is derived from, or empty
    _remote_number: int
    _remote_peer: Peer

    def __init__(self, peer: Peer, number: int, base: str) -> None:
        object.__setattr__(self, "_remote_peer", peer)
        object.__setattr__(self, "_remote_number", number)
        object.__setattr__(self, "_remote_base", base)

    @property
    def __class__(self) -> type:  # isinstance(x, tuple) holds for a named tuple
        return _TYPES.get(self._remote_base, Remote)

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("the class of another process's object can't be set")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _ATTRIBUTES:
            raise AttributeError(name)
        return self._remote_peer.ask("getattr", self, name)

    def __contains__(self, item: object) -> bool:  # compared here: its owner does not learn what is looked for
        return any(item is element or item == element for element in iter(self))


def _unary(name: str) -> Callable[..., Any]:
    def method(self: Remote, *args: Any, **named: Any) -> Any:
        return self._remote_peer.ask(name, self, *args, **named)

    return method


def _binary(name: str, reflected: bool) -> Callable[..., Any]:
    def method(self: Remote, other: object) -> Any:
        return self._remote_peer.combine(name, *((other, self) if reflected else (self, other)))

    return method


for _name in UNARY:
    setattr(Remote, _name, _unary(_name))
for _name in (*COMPARISONS, *ARITHMETIC):
    setattr(Remote, _name, _binary(_name, reflected=False))
    if _name in ARITHMETIC:
        setattr(Remote, f"__r{_name[2:]}", _binary(_name, reflected=True))


class Peer:
    """One end of the socket. This one performs what the other side asks for; a judge's is stricter."""

    def __init__(self, socket: int) -> None:
        self._socket = socket
        self._owned: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Any] = {}  # by the owner's number: `Remote`s, and classes made for its exceptions
        self._mirrored: dict[type, int] = {}

    def ask(self, operation: str, *args: Any, **named: Any) -> Any:
        """The result of an operation in the other process. Raises: what it has raised; WireError, Closed."""
        containers = Containers()
        self._send(b"?", (operation, args, tuple(named.items())), containers)
        while True:
            kind, body = self._receive()
            if kind == b"?":
                self.reply(body)
                continue
            result, changes = self._fields(body, containers, 2)
            containers.apply(changes)
            if kind == b"=":
                return result
            raise result if isinstance(result, BaseException) else WireError("an error that is no exception")

    def serve(self) -> None:
        """Performs what the other process asks for, until it has ended."""
        while True:
            kind, body = self._receive()
            if kind == b"?":
                self.reply(body)

    def reply(self, body: bytes) -> None:
        """Performs one operation. Raises: Closed."""
        containers = Containers()
        try:
            operation, args, named = self._fields(body, containers, 3)
            containers.remember()
            self._send(b"=", (self.perform(operation, args, dict(named)), containers.changes()), containers)
        except (Closed, Refused):
            raise
        except BaseException as error:  # noqa: BLE001 - whatever a program raises is its caller's
            self._send(b"!", (error, ()), Containers())

    def perform(self, operation: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The result of an operation on one of this process's objects."""
        return OPERATIONS[operation](*args, **named)

    def combine(self, operation: str, left: Any, right: Any) -> Any:
        """The result of a binary operation, at least one operand of which is the other process's."""
        return self.ask(operation, left, right)

    def describe(self, value: Any) -> tuple[Any, ...]:
        """Plain fields for a value that has no bytes of its own."""
        kind = type(value)
        if kind is Remote:
            return "yours", value._remote_number
        if isinstance(value, type):
            return self._describe_type(value)
        if isinstance(value, BaseException):
            public = {name: member for name, member in vars(value).items() if not name.startswith("_")}
            return "error", kind, value.args, str(value), public
        if kind.__module__ == "numpy" and hasattr(value, "item") and not hasattr(value, "__len__"):  # a scalar
            return "plain", value.item()
        base = _base(value)
        return "mine", self.export(value), base.__name__ if base else ""

    def _describe_type(self, kind: type) -> tuple[Any, ...]:
        if _TYPES.get(kind.__name__) is kind:
            return "type", kind.__name__
        if kind in self._mirrored:
            return "yours", self._mirrored[kind]
        if issubclass(kind, BaseException):
            return "error type", self.export(kind), kind.__name__, kind.__base__
        return "mine", self.export(kind), ""

    def export(self, value: Any) -> int:
        """The number of one of this process's objects, which stays alive from now on."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._owned)
            self._owned.append(value)
        return self._numbers[id(value)]

    def resolve(self, kind: str, *fields: Any) -> Any:
        """The value that fields of the other process's `describe` stand for."""
        return _RESOLVERS[kind](self, *fields)

    def _own(self, number: int) -> Any:
        return self._owned[number]

    def _remote(self, number: int, base: str) -> Any:
        if number not in self._remotes:
            self._remotes[number] = Remote(self, number, base)
        return self._remotes[number]

    def _error_type(self, number: int, name: str, base: Any) -> Any:
        if number not in self._remotes:
            self._remotes[number] = type(name, (_checked(base),), {"__str__": lambda error: error._text})
            self._mirrored[self._remotes[number]] = number
        return self._remotes[number]

    def _error(self, kind: Any, args: Any, text: str, public: Any) -> BaseException:
        try:
            error: BaseException = _checked(kind).__new__(kind, *args)
        except TypeError:
            error = _checked(kind).__new__(kind)
        error.args = args
        if kind in self._mirrored:
            error._text = text  # type: ignore[attr-defined]
        for name, value in public.items():
            if not name.startswith("_"):
                setattr(error, name, value)
        return error

    def _fields(self, body: bytes, containers: Containers, count: int) -> Any:
        value = Decoder(body, containers, self.resolve).value()
        if type(value) is not tuple or len(value) != count:
            raise WireError("a message of another form")
        return value

    def _send(self, kind: bytes, value: Any, containers: Containers) -> None:
        body = encode(value, containers, self.describe)
        message = memoryview(_LENGTH.pack(len(body) + 1) + kind + body)
        try:
            while message:
                message = message[os.write(self._socket, message) :]
        except OSError:
            raise Closed from None

    def _receive(self) -> tuple[bytes, bytes]:
        message = self._read(_LENGTH.unpack(self._read(_LENGTH.size))[0])
        return message[:1], message[1:]

    def _read(self, size: int) -> bytes:
        pieces = []
        while size:
            try:
                piece = os.read(self._socket, min(size, 1 << 20))
            except OSError:
                piece = b""
            if not piece:
                raise Closed
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)


_RESOLVERS: Final[dict[str, Callable[..., Any]]] = {
    "yours": Peer._own,
    "mine": Peer._remote,
    "type": lambda peer, name: _TYPES[name],
    "error type": Peer._error_type,
    "error": Peer._error,
    "plain": lambda peer, value: value,
}


def _base(value: Any) -> Any:
    """The plain type that a value's type is derived from; None without one."""
    return next((kind for kind in type(value).__mro__ if kind in _AS_PLAIN), None)


def _checked(kind: Any) -> Any:
    if not isinstance(kind, type) or not issubclass(kind, BaseException):
        raise WireError("an exception's class that is none")
    return kind
