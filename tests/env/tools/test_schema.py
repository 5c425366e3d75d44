"""Tools from functions and from JSON schemas: schemas, validation, calls."""

import asyncio
import json
import sys
import threading
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from slipstream.configs.runtime.errors import ConfigError
from slipstream.env.tools import schema as tool_schema
from slipstream.env.tools.schema import BadArguments, Tool

DEADLINE_S = 30.0


def weather(
    city: str,
    days: Annotated[int, Field(ge=1, le=7)] = 1,
    unit: Literal["C", "F"] = "C",
    schema: list[str] | None = None,
) -> dict[str, Any]:
    """Looks the weather up.

    Of one city only.

    Args:
        city: name of the city,
            in English.
        unit (str): of temperatures.

    Returns:
        a forecast.
    """
    return {"city": city, "days": days, "unit": unit, "schema": schema}


async def weather_async(city: str) -> str:
    return f"{city}: sun"


class Weather:
    """Weather of a station."""

    def __call__(self, city: str) -> str:
        return f"{city}: rain"

    def method(self, city: str) -> None:
        """Nothing."""


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": ["integer", "null"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WHOLE = {"type": "function", "function": {"name": "weather", "description": "W.", "parameters": PARAMETERS}}


def test_schema_comes_from_signature_and_docstring() -> None:
    described = Tool.from_function(weather).schema["function"]
    assert described["name"] == "weather"
    assert described["description"] == "Looks the weather up.\n\nOf one city only."
    parameters = described["parameters"]
    assert parameters["required"] == ["city"]
    assert parameters["properties"]["city"] == {"type": "string", "description": "name of the city, in English."}
    assert parameters["properties"]["days"] == {"type": "integer", "minimum": 1, "maximum": 7, "default": 1}
    assert parameters["properties"]["unit"]["enum"] == ["C", "F"]
    assert '"title"' not in json.dumps(described)


async def test_plain_and_async_functions_are_called() -> None:
    result = await Tool.from_function(weather).call({"city": "Ulm", "days": 2, "schema": ["a"]})
    assert json.loads(result) == {"city": "Ulm", "days": 2, "unit": "C", "schema": ["a"]}
    assert await Tool.from_function(weather_async).call({"city": "Ulm"}) == "Ulm: sun"
    station = Tool.from_function(Weather(), name="station")
    assert (station.name, await station.call({"city": "Ulm"})) == ("station", "Ulm: rain")
    assert await Tool.from_function(Weather().method, description="d").call({"city": "Ulm"}) == ""


async def test_texts_are_decoded_where_the_schema_wants_another_type() -> None:
    result = await Tool.from_function(weather).call({"city": "12", "days": "3", "schema": '["a"]'})
    assert json.loads(result) == {"city": "12", "days": 3, "unit": "C", "schema": ["a"]}
    tool = Tool.from_schema(WHOLE, lambda **given: given)
    assert json.loads(await tool.call({"city": "12", "days": "3"})) == {"city": "12", "days": 3}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({}, "city"), ({"city": "Ulm", "town": 1}, "town"), ({"city": 3}, "city"), ({"city": "a", "days": "x"}, "days")],
)
async def test_bad_arguments_are_named(arguments: dict[str, Any], named: str) -> None:
    for tool in (Tool.from_function(weather), Tool.from_schema(WHOLE, weather)):
        with pytest.raises(BadArguments, match=named):
            await tool.call(arguments)


async def test_errors_of_the_function_are_its_own() -> None:
    def broken(city: str) -> str:
        return weather_async(days=3)  # type: ignore[call-arg,return-value]

    def leaves(city: str) -> str:
        raise SystemExit(0)

    with pytest.raises(TypeError):
        await Tool.from_function(broken).call({"city": "Ulm"})
    with pytest.raises(RuntimeError, match="SystemExit"):
        await Tool.from_function(leaves).call({"city": "Ulm"})


def untyped(city) -> str:  # type: ignore[no-untyped-def]
    return ""


def variadic(*cities: str) -> str:
    return ""


def opaque(city: threading.Lock) -> str:
    return ""


@pytest.mark.parametrize("function", [untyped, variadic, opaque, dict])
def test_function_without_a_schema_is_refused(function: Any) -> None:
    with pytest.raises(ConfigError, match=function.__name__):
        Tool.from_function(function)


@pytest.mark.parametrize("schema", [{}, {"function": {}}, PARAMETERS])
def test_schema_without_a_name_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Tool.from_schema(schema, weather)


def test_invalid_json_schema_is_refused() -> None:
    bad = {"type": "function", "function": {"name": "weather", "parameters": {"type": "thing"}}}
    with pytest.raises(ConfigError, match=r"\$\.type"):
        Tool.from_schema(bad, weather)


async def test_hanging_calls_keep_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_schema, "MOST_THREADS", 1)
    release, started = threading.Event(), threading.Event()

    def hang(city: str) -> str:
        started.set()
        release.wait(DEADLINE_S)
        return city

    tool = Tool.from_function(hang)
    first = asyncio.ensure_future(tool.call({"city": "a"}))
    await asyncio.to_thread(started.wait, DEADLINE_S)
    first.cancel()
    second = asyncio.ensure_future(tool.call({"city": "b"}))
    assert not (await asyncio.wait([second], timeout=0.05))[0]
    release.set()
    assert await asyncio.wait_for(second, DEADLINE_S) == "b"


def test_missing_validator_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ConfigError, match=r"slipstream\[mcp\]"):
        Tool.from_schema(WHOLE, weather)


@pytest.mark.parametrize(("result", "text"), [("a", "a"), (None, ""), ([1, "é"], '[1, "é"]'), ({1}, "{1}")], ids=repr)
async def test_results_become_text(result: object, text: str) -> None:
    async def give() -> object:
        return result

    assert await Tool.from_function(give).call({}) == text
