"""Implementations by name: built in, installed as an entry point, or `module:attribute`."""

import ast
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream.configs.runtime.errors import ConfigError, format_error_with_location, suggest
from slipstream.configs.runtime.signals import STOP_EXIT_CODES


@dataclass(frozen=True)
class InstalledPlugin:
    """An entry point of an installed package.

    Attributes:
        target: `module:attribute`.
        package: name and version of the distribution.
        problem: why it can't be used; empty if it can.
    """

    kind: str
    name: str
    target: str
    package: str
    problem: str


@dataclass(frozen=True)
class Registry:
    """Implementations by name: built in, an entry point of an installed package, or `module:attribute`.

    Attributes:
        kind: `env`, `tool`, `reward`, `trainer`, `advantage`, `loss`, …, as in messages; entry points are in the group
            `slipstream.envs`, `slipstream.losses`, ….
        built_in: `module:attribute` by name; a module is imported when one of its names is first loaded.
    """

    kind: str
    built_in: Mapping[str, str]

    def resolve(self, name: str) -> str:
        """`module:attribute` of an implementation. Raises: ConfigError with the known names."""
        if name in self.built_in:
            return self.built_in[name]
        if ":" in name:
            return name
        installed: dict[str, str] = {}
        for point in _entry_points(self.kind):
            installed.setdefault(point.name, point.value)
        if name in installed:
            return installed[name]
        known = sorted([*self.built_in, *installed])
        hint = suggest(name, known) or f"; known: {', '.join(known)}, or module:attribute"
        raise ConfigError(f"there is no {self.kind} {name!r}{hint}")

    def load(self, name: str) -> Any:
        """The implementation. Raises: ConfigError with the known names, or the reason why the import failed."""
        return _import(self.kind, self.resolve(name))

    def bind(self, name: str, options: Mapping[str, Any]) -> Callable[[Any], Any]:
        """Loads a function and binds its options; it takes its input as the only further argument.

        Raises: ConfigError as `load` does, and if it is not a function of these options.
        """
        function = self.load(name)
        if not callable(function):
            raise ConfigError(f"{self.kind} {name!r} must be a function, not {type(function).__name__}")
        try:
            inspect.signature(function).bind(None, **options)
        except (TypeError, ValueError) as error:  # ValueError: a C function without a signature
            names = ", ".join(options) or "none"
            raise ConfigError(f"{self.kind} {name!r} can't be called with its options ({names}): {error}") from None
        return partial(function, **options)

    def installed(self) -> Iterator[InstalledPlugin]:
        """All entry points of the kind; each is imported."""
        seen = dict.fromkeys(self.built_in, "slipstream")
        for point in _entry_points(self.kind):
            package = f"{point.dist.name} {point.dist.version}" if point.dist else ""
            problem = ""
            if point.name in seen:
                problem = f"not used: {seen[point.name]} has a plug-in of this name"
            else:
                seen[point.name] = package
                try:
                    _import(self.kind, point.value)
                except ConfigError as error:
                    problem = str(error)
            yield InstalledPlugin(self.kind, point.name, point.value, package, problem)


def _entry_points(kind: str) -> Iterable[EntryPoint]:
    return entry_points(group=f"slipstream.{kind}{'es' if kind.endswith('s') else 's'}")


def code_fingerprint(module: str) -> str:
    """Hash of a module's source without comments and layout, of all files of a package; empty without source.

    Modules that it imports from elsewhere are not part of it.
    """
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):  # ValueError: a module that other code has made
        spec = None
    file = Path((spec and spec.origin) or "")
    if file.suffix != ".py" or not file.is_file():
        return ""
    files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(file.parent)}\n{_code(path)}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()[:16]


def _code(file: Path) -> str:
    source = file.read_bytes()
    try:
        return ast.unparse(ast.parse(source))
    except (SyntaxError, ValueError):  # a file of the package that nobody imports; ValueError: null bytes
        return hashlib.sha256(source).hexdigest()


def _import(kind: str, name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{kind} {name!r} must look like module:attribute")
    try:
        module = import_module(module_name)
    # Any exception of a user's module is a mistake in it; so is its sys.exit(), which would end this process with
    # success. But a signal handler may have raised SystemExit meanwhile.
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code in STOP_EXIT_CODES:
            raise
        why = format_error_with_location(error, module_name)
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            why += "; install it, or put the folder that it is in on PYTHONPATH: the working directory is not searched"
        raise ConfigError(f"{kind} {name!r}: module {module_name!r} can't be imported: {why}") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"{kind} {name!r}: module {module_name!r} has no {attribute!r}")
    return getattr(module, attribute)
