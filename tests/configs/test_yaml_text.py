"""What a configuration's YAML may say, and how it is read."""

from pathlib import Path

import pytest

from slipstream.configs.yaml_text import YamlError, read_yaml, write_yaml
from tests.configs.conftest import problems_of


@pytest.mark.parametrize(
    ("text", "line", "key", "first"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "a", 1),
        ("learner:\n  steps: 3\n  kl: null\n  steps: 4\n", 4, "steps", 2),
        ("rewards: [{name: a, weight: 1, weight: 2}]\n", 1, "weight", 1),
        ("a: {x: 1}\n'a': 2\n", 2, "a", 1),
    ],
)
def test_a_key_that_is_given_twice_is_refused_where_it_stands(text: str, line: int, key: str, first: int) -> None:
    with pytest.raises(YamlError, match=f"^the key '{key}' is given twice, first on line {first}: keep one$") as caught:
        read_yaml(text)
    assert caught.value.line == line


def test_a_key_that_is_given_twice_in_a_file_is_named_with_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {build: digits}\nlearner: {steps: 3}\nlearner: {groups_per_step: 8}\n", encoding="utf-8")
    assert problems_of(file) == (f"{file}:3: the key 'learner' is given twice, first on line 2: keep one",)


def test_a_key_may_go_before_the_same_key_of_a_mapping_that_is_merged_in() -> None:
    assert read_yaml("base: &base {x: 1, y: 2}\nown: {<<: *base, x: 3}\nother: {<<: *base}\n") == {
        "base": {"x": 1, "y": 2},
        "own": {"x": 3, "y": 2},
        "other": {"x": 1, "y": 2},
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("-2E5", -200000.0),
        ("+.5e1", 5.0),
        ("1.e3", 1000.0),
        ("1.0e-3", 0.001),
        ("15", 15),
        ("1.5", 1.5),
    ],
)
def test_a_number_may_have_an_exponent_without_a_point(text: str, value: float) -> None:
    read = read_yaml(f"options: {{rate: {text}}}")["options"]["rate"]
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize("text", ["e3", "1e", "1e-", "a1e3", "1e3b", "1e3.5", "'1e-3'"])
def test_what_only_looks_like_an_exponent_stays_a_text(text: str) -> None:
    assert read_yaml(f"[{text}]") == [text.strip("'")]


@pytest.mark.parametrize("text", ["010", "-017", "1:30", "12:30:45", "1:30.5"])
def test_what_yaml_once_took_for_an_octal_number_or_for_minutes_stays_a_text(text: str) -> None:
    assert read_yaml(f"a: {text}") == {"a": text}


@pytest.mark.parametrize("text", ["2026-01-31", "2026-01-31 12:00:00", "="])
def test_a_date_and_an_equals_sign_are_texts_as_any_other(text: str) -> None:
    assert read_yaml(f"[{text}]") == [text]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("options: {1: a}", "the key '1' is no text; quote it"),
        ("options: {on: a}", "the key 'on' is no text; quote it"),
        ("options: {[1, 2]: a}", "a key is no text; quote it"),
        ("options: &all {inner: [*all]}", "*all stands inside of what it repeats"),
        ("options: &all [1, *all]", "*all stands inside of what it repeats"),
        ("options: " + 60 * "[" + 60 * "]", "more than 50 mappings and lists stand inside each other"),
        ("options: !!set {a, b}", "not valid YAML: could not determine a constructor for the tag "),
        ("options: !!binary aGVsbG8=", "not valid YAML: could not determine a constructor for the tag "),
    ],
)
def test_what_json_could_not_say_is_refused_because_other_processes_would_read_something_else(
    text: str, problem: str
) -> None:
    with pytest.raises(YamlError) as caught:
        read_yaml(f"name: x\n{text}\n")
    assert str(caught.value).startswith(problem)
    assert caught.value.line == 2


def test_what_is_repeated_beside_itself_is_no_circle() -> None:
    assert read_yaml("a: &a [1]\nb: [*a, *a]\nc: {d: *a}\n") == {"a": [1], "b": [[1], [1]], "c": {"d": [1]}}


@pytest.mark.parametrize("value", ["1e-3", "1E5", 1e-7, 1e22, "2026-01-31", "on", "="])
def test_what_is_written_is_read_back_as_it_was(value: object) -> None:
    assert read_yaml(write_yaml({"x": [value]})) == {"x": [value]}


@pytest.mark.parametrize(
    ("text", "line"), [("a: 1\nb: ]", 2), ("!!int x", None), ("!!bool x", None), ("a: \x00", None)]
)
def test_what_is_no_yaml_is_refused_with_its_line_where_that_is_known(text: str, line: int | None) -> None:
    with pytest.raises(YamlError, match=r"^not valid YAML: .*\Z") as caught:  # in one line
        read_yaml(text)
    assert caught.value.line == line
