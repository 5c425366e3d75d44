"""A tool: a name, the schema of its arguments, and the function that is called with them."""

import asyncio
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from slipstream.configs.runtime.errors import ConfigError, SlipstreamError, format_error
from slipstream.configs.runtime.threads import run_in_thread

MOST_THREADS: Final = 64
"""Calls of one plain function at once. A call that hangs keeps its thread, past its deadline too."""

_ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


class ToolError(SlipstreamError):
    """A call failed; the message is the observation. So is that of any other exception, with its type."""


class BadArguments(ToolError):
    """The arguments of a call don't fit the tool's schema."""


class ToolUnavailable(SlipstreamError):
    """A tool can't work at all, whatever its arguments: its server or its sandbox is gone.

    It costs the episode, unlike any other exception of a tool, which becomes an observation.
    """


@dataclass(frozen=True)
class Tool:
    """A function that a policy may call.

    Attributes:
        name: as in calls.
        schema: the whole schema for chat templates: `{"type": "function", "function": {"name": ..., ...}}`.
        call: runs it and returns the observation. Raises: BadArguments, ToolUnavailable, and whatever the function
            raises.
    """

    name: str
    schema: Mapping[str, Any]
    call: Callable[[Mapping[str, Any]], Awaitable[str]]

    @classmethod
    def from_function(
        cls, function: Callable[..., Any], *, name: str | None = None, description: str | None = None
    ) -> "Tool":
        """A tool from a plain or async function; plain ones run in threads.

        Types, defaults and pydantic's `Annotated[..., Field(...)]` of its parameters give the schema. The docstring
        gives the description, and its section `Args:` those of the parameters. Results that are no text become JSON.

        Raises: ConfigError for a function whose schema can't be derived.
        """
        name = name or str(getattr(function, "__name__", type(function).__name__))
        text, about = _read_docstring(function)
        model = _arguments_model(function, name)
        parameters = _parameters(model, about)
        run = _awaitable(function)

        async def call(given: Mapping[str, Any]) -> str:
            try:
                valid = model.model_validate(_with_json_values(given, parameters))
            except ValidationError as error:
                raise BadArguments(_problems(error)) from None
            fields = type(valid).model_fields
            return as_text(await run(**{str(fields[key].alias): value for key, value in valid}))

        return cls(name, whole_schema(name, text if description is None else description, parameters), call)

    @classmethod
    def from_schema(cls, schema: Mapping[str, Any], function: Callable[..., Any]) -> "Tool":
        """A tool from a whole JSON schema and a plain or async function that takes the arguments by name.

        Raises: ConfigError for a schema that is none, or without the package jsonschema.
        """
        try:
            import jsonschema
        except ImportError:
            raise ConfigError('tools from a JSON schema need jsonschema: pip install "slipstream[mcp]"') from None
        described = schema.get("function")
        if not isinstance(described, Mapping) or not isinstance(described.get("name"), str):
            raise ConfigError(f"a tool's schema looks like {{'type': 'function', 'function': {{'name': …}}}}: {schema}")
        name, parameters = described["name"], described.get("parameters") or {"type": "object", "properties": {}}
        kind = jsonschema.validators.validator_for(parameters)
        try:
            kind.check_schema(parameters)
        except jsonschema.SchemaError as error:
            raise ConfigError(f"tool {name!r}: {error.json_path} of its parameters: {error.message}") from None
        validator, run = kind(parameters), _awaitable(function)

        async def call(given: Mapping[str, Any]) -> str:
            arguments = _with_json_values(given, parameters)
            problems = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(arguments)]
            if problems:
                raise BadArguments("; ".join(problems))
            return as_text(await run(**arguments))

        return cls(name, schema, call)


class Toolbox(Protocol):
    """Tools that are made together and may share a process.

    Attributes:
        tools: their names and schemas, which must not change during a run.
        fingerprint: of the data that results depend on, such as a corpus; all servers of a run must have the same.

    It may have an attribute `resumable` that is true: calls may be repeated in a new episode, with the same results
    (`Session`).
    """

    @property
    def tools(self) -> Sequence[Tool]: ...

    @property
    def fingerprint(self) -> str: ...

    async def open(self, episode: AsyncExitStack) -> Sequence[Tool]:
        """The tools for one episode; what they hold for it is freed by `episode`, at its end."""
        ...


@dataclass(frozen=True)
class SharedTools:
    """Tools without state of an episode."""

    tools: Sequence[Tool]
    fingerprint: str = ""
    resumable: bool = False

    async def open(self, episode: AsyncExitStack) -> Sequence[Tool]:
        """The same tools for every episode."""
        return self.tools


def whole_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema in the form that chat templates expect."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def as_text(result: object) -> str:
    """A tool's result as an observation: a text as it is, nothing for None, other values as JSON."""
    if isinstance(result, str):
        return result
    if result is None:
        return ""
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(result)


def _arguments_model(function: Callable[..., Any], name: str) -> type[BaseModel]:
    """Validates the arguments of a function; each field has the name of a parameter as alias. Raises: ConfigError."""
    try:
        signature = inspect.signature(function)
        hints = get_type_hints(
            function if inspect.isroutine(function) else type(function).__call__, include_extras=True
        )
        fields: dict[str, Any] = {}
        for index, parameter in enumerate(signature.parameters.values()):
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigError(f"tool {name!r}: its parameter {parameter} can't be given by name")
            if parameter.name not in hints:
                raise ConfigError(f"tool {name!r}: its parameter {parameter.name} has no type")
            default = ... if parameter.default is parameter.empty else parameter.default
            # A parameter may have a name that fields can't have, such as `schema`.
            fields[f"argument_{index}"] = (hints[parameter.name], Field(default, alias=parameter.name))
        return create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)
    except (TypeError, ValueError, NameError, PydanticUserError) as error:
        raise ConfigError(f"tool {name!r}: no schema can be derived: {format_error(error)}") from error


def _parameters(model: type[BaseModel], about: Mapping[str, str]) -> dict[str, Any]:
    """The JSON schema of the arguments, with the docstring's descriptions and without pydantic's titles."""
    schema = model.model_json_schema()
    for name, described in schema.setdefault("properties", {}).items():
        if name in about:
            described.setdefault("description", about[name])
    untitled: dict[str, Any] = _without_titles(schema)
    return untitled


def _without_titles(value: Any, *, names: bool = False) -> Any:
    """The schema without the key `title`; `names`: the keys of this object are names, not keywords."""
    if isinstance(value, dict):
        return {
            key: _without_titles(inner, names=key in ("properties", "$defs") and not names)
            for key, inner in value.items()
            if names or key != "title"
        }
    return [_without_titles(each) for each in value] if isinstance(value, list) else value


def _read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The description of a function, and of its parameters by name, from a docstring with a section `Args:`."""
    text, about, last = inspect.getdoc(function) or "", dict[str, str](), ""
    head, _, rest = text.partition("\nArgs:\n")
    for line in rest.splitlines():
        if line and not line[0].isspace():
            break  # the next section, or text behind
        if match := _ARGUMENT.fullmatch(line.strip()) if len(line) - len(line.lstrip()) <= 4 else None:
            last, about[match[1]] = match[1], match[2]
        elif last and line.strip():
            about[last] += f" {line.strip()}"
    for section in ("\nReturns:\n", "\nRaises:"):
        head = head.partition(section)[0]
    return head.strip(), about


def _with_json_values(given: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with texts decoded where the schema allows no text: in `qwen3_xml` all values are texts."""
    properties, arguments = parameters.get("properties", {}), dict(given)
    for name, value in given.items():
        if isinstance(value, str) and name in properties and not _may_be_text(properties[name]):
            with suppress(ValueError, RecursionError):  # the validator names the argument and the type
                arguments[name] = json.loads(value)
    return arguments


def _may_be_text(schema: Any) -> bool:
    """True unless the schema names types without `string`."""
    if not isinstance(schema, Mapping):
        return True
    options = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if options:
        return any(_may_be_text(option) for option in options)
    kind = schema.get("type")
    return kind is None or kind == "string" or (isinstance(kind, list) and "string" in kind)


def _problems(error: ValidationError) -> str:
    details = error.errors(include_url=False, include_input=False, include_context=False)
    return "; ".join(f"{'.'.join(map(str, detail['loc'])) or 'arguments'}: {detail['msg']}" for detail in details)


def _awaitable(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """The function itself if it is async, else one that runs it in a thread."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return function
    slots = asyncio.Semaphore(MOST_THREADS)

    async def run(**arguments: Any) -> Any:
        await slots.acquire()
        try:
            future = run_in_thread(_call_plain, function, arguments)
        except RuntimeError as error:
            slots.release()
            raise ToolUnavailable(f"no thread for a tool: {error}") from error
        future.add_done_callback(settle)
        return await asyncio.shield(future)

    def settle(future: "asyncio.Future[Any]") -> None:
        slots.release()
        future.exception()  # retrieved: after its deadline nobody waits for it

    return run


def _call_plain(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return function(**arguments)
    except (SystemExit, KeyboardInterrupt) as error:  # they would end the thread without a result
        raise RuntimeError(f"the tool raised {type(error).__name__}") from error
