"""The YAML of configurations: what it may contain, and how values are read."""

import pytest

from slipstream.configs.yaml_text import YamlError, read_yaml, write_yaml


@pytest.mark.parametrize(
    ("text", "line", "key", "first"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "a", 1),
        ("learner:\n  steps: 3\n  kl: null\n  steps: 4\n", 4, "steps", 2),
        ("rewards: [{name: a, weight: 1, weight: 2}]\n", 1, "weight", 1),
        ("a: {x: 1}\n'a': 2\n", 2, "a", 1),
    ],
)
def test_repeated_key_is_refused_with_its_line(text: str, line: int, key: str, first: int) -> None:
    with pytest.raises(YamlError, match=f"'{key}' .* line {first}") as caught:
        read_yaml(text)
    assert caught.value.line == line


def test_key_overrides_that_of_a_merged_mapping() -> None:
    assert read_yaml("base: &base {x: 1, y: 2}\nown: {<<: *base, x: 3}\nother: {<<: *base}\n") == {
        "base": {"x": 1, "y": 2},
        "own": {"x": 3, "y": 2},
        "other": {"x": 1, "y": 2},
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 0.001), ("-2E5", -2e5), ("+.5e1", 5.0), ("1.e3", 1e3), ("1.0e-3", 0.001), ("15", 15), ("1.5", 1.5)],
)
def test_number_may_have_an_exponent_without_a_point(text: str, value: float) -> None:
    read = read_yaml(f"options: {{rate: {text}}}")["options"]["rate"]
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    "text",
    [
        "e3", "1e", "1e-", "a1e3", "1e3b", "1e3.5", "'1e-3'",
        "010", "-017", "1:30", "12:30:45", "1:30.5", "2026-01-31", "2026-01-31 12:00:00", "=",
    ],
)  # fmt: skip
def test_malformed_exponents_octals_minutes_and_dates_stay_text(text: str) -> None:
    assert read_yaml(f"[{text}]") == [text.strip("'")]


@pytest.mark.parametrize("value", ["1e-3", "1E5", 1e-7, 1e22, "2026-01-31", "on", "="])
def test_written_values_read_back_the_same(value: object) -> None:
    assert read_yaml(write_yaml({"x": [value]})) == {"x": [value]}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("options: {1: a}", "the key '1'"),
        ("options: {on: a}", "the key 'on'"),
        ("options: {[1, 2]: a}", "a key"),
        ("options: &all {inner: [*all]}", "*all"),
        ("options: &all [1, *all]", "*all"),
        ("options: " + 60 * "[" + 60 * "]", "more than 50"),
        ("options: !!set {a, b}", "not valid YAML"),
        ("options: !!binary aGVsbG8=", "not valid YAML"),
    ],
)
def test_value_without_json_counterpart_is_refused(text: str, problem: str) -> None:
    with pytest.raises(YamlError) as caught:
        read_yaml(f"name: x\n{text}\n")
    assert str(caught.value).startswith(problem)
    assert caught.value.line == 2


def test_repeated_alias_is_no_circle() -> None:
    assert read_yaml("a: &a [1]\nb: [*a, *a]\nc: {d: *a}\n") == {"a": [1], "b": [[1], [1]], "c": {"d": [1]}}


@pytest.mark.parametrize(
    ("text", "line"), [("a: 1\nb: ]", 2), ("!!int x", None), ("!!bool x", None), ("a: \x00", None)]
)
def test_invalid_yaml_is_refused_with_its_line(text: str, line: int | None) -> None:
    with pytest.raises(YamlError, match=r"^not valid YAML: .*\Z") as caught:  # in one line
        read_yaml(text)
    assert caught.value.line == line
