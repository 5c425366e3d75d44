"""`key.path=value` on the command line."""

from pathlib import Path

import pytest

from slipstream.configs import load
from slipstream.configs.load import load_config
from tests.configs.conftest import problems_of

DEMO = Path(load.__file__).parent / "demo.yaml"
NAME_OR_ADDRESS = "must be a name or an address without brackets and port, such as ::1"
PORT_AND_BRACKETS = (
    "must end with a port from 1 to 65535, and an IPv6 host stands in brackets, such as tcp://[::1]:5555"
)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("learner.steps", "override 'learner.steps' must look like key.path=value"),
        ("=3", "override '=3' must look like key.path=value"),
        ("learner..steps=3", "override 'learner..steps=3' must look like key.path=value"),
        (".steps=3", "override '.steps=3' must look like key.path=value"),
        ("extends=demo.yaml", "override 'extends=demo.yaml': extends stands in the file alone"),
        ("buffer.filters=[{keep: 4}]", "buffer.filters.0: must have a name"),
        ("run.dir=~nobody-here/runs", "run.dir: Could not determine home directory. (given: '~nobody-here/runs')"),
        (
            "learner.steps=[",
            "override 'learner.steps=[': not valid YAML: expected the node content, but found '<stream end>'",
        ),
        (
            "env.options={a: 1, a: 2}",
            "override 'env.options={a: 1, a: 2}': the key 'a' is given twice, first on line 1: keep one",
        ),
        ("run.name.first=x", "override 'run.name.first=x': 'name' is not a section"),
        ("learner.stepps=3", "learner.stepps: unknown key (did you mean 'steps'?)"),
        ("rewards=[]", "rewards must name at least one term"),
        ("learner.steps=0", "learner.steps: Input should be greater than or equal to 1 (given: 0)"),
        (
            "buffer.max_staleness=99999999999999999999",
            "buffer: max_staleness should be less than or equal to 4611686018427387904 (given: 99999999999999999999)",
        ),
        ("run.seed=-1", "run.seed: Input should be greater than or equal to 0 (given: -1)"),
        (
            "rollout.groups_in_flight=1000000",
            "rollout.groups_in_flight: Input should be less than 1000000 (given: 1000000)",
        ),
        (
            "rollout.sampling.temperature=0.009",
            "rollout.sampling.temperature: Input should be greater than or equal to 0.01 (given: 0.009)",
        ),
        (
            "buffer.bind=tcp://127.0.0.1:99999",
            f"buffer: the address tcp://127.0.0.1:99999 {PORT_AND_BRACKETS}",
        ),
        ("buffer.bind=tcp://127.0.0.1:*", f"buffer: the address tcp://127.0.0.1:* {PORT_AND_BRACKETS}"),
        ("buffer.more_endpoints=[tcp://h]", f"buffer: the address tcp://h {PORT_AND_BRACKETS}"),
        ("buffer.bind=tcp://::1:5555", f"buffer: the address tcp://::1:5555 {PORT_AND_BRACKETS}"),
        ("buffer.endpoint=tcp://[::1:5555", f"buffer: the address tcp://[::1:5555 {PORT_AND_BRACKETS}"),
        ("buffer.endpoint=tcp://[::1]", f"buffer: the address tcp://[::1] {PORT_AND_BRACKETS}"),
        ("weights.host='[::1]'", f"weights: the host '[::1]' {NAME_OR_ADDRESS}"),
        ("weights.host=http://learner", f"weights: the host 'http://learner' {NAME_OR_ADDRESS}"),
        ("weights.bind=learner:5556", f"weights: the host 'learner:5556' {NAME_OR_ADDRESS}"),
        (
            "buffer.endpoint=tcp://*:5555",
            "buffer: the endpoint tcp://*:5555 names no host: * stands for all addresses to listen on (bind)",
        ),
        (
            "learner.wait_deadline_s=1e10",
            "learner.wait_deadline_s: Input should be less than or equal to 1000000 (given: 10000000000.0)",
        ),
        (
            "buffer.server_deadline_s=1",
            "buffer.server_deadline_s: Input should be greater than or equal to 2 (given: 1)",
        ),
        ("weights.deadline_s=.inf", "weights.deadline_s: Input should be a finite number (given: inf)"),
        (
            "rollout.group_size=20000",
            "rollout.group_size: Input should be less than or equal to 16384 (given: 20000)",
        ),
    ],
)
def test_a_wrong_override_is_named(override: str, problem: str) -> None:
    assert problems_of(DEMO, override) == (problem,)


def test_an_override_reaches_into_a_section_that_is_written_as_its_name_or_as_null(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {build: digits}\nlearner: {loss: gspo, kl: null}\n", encoding="utf-8")
    config = load_config(file, ["learner.loss.clip_low=0.25", "learner.kl.coefficient=0.5"])
    learner = config.model_dump()["learner"]
    assert (learner["loss"]["name"], learner["loss"]["clip_low"], learner["kl"]["coefficient"]) == ("gspo", 0.25, 0.5)


def test_the_last_override_of_a_key_wins_and_values_are_read_as_yaml() -> None:
    config = load_config(
        DEMO, ["learner.steps=3", "learner.steps=7", "env.options={operation: copy}", "redis.url=null"]
    )
    assert (config.learner.steps, config.env.options, config.redis.url) == (7, {"operation": "copy"}, None)


@pytest.mark.parametrize(
    ("override", "value"),
    [("123", "123"), ("1e3", "1e3"), ("on", "on"), ("2026-01-31", "2026-01-31"), ("'7'", "7"), ("'on'", "on")],
)
def test_an_override_of_a_text_is_one_though_a_shell_has_taken_its_quotes(override: str, value: str) -> None:
    config = load_config(DEMO, [f"run.name={override}", f"security.keys={override}", f"weights.host={override}"])
    assert (config.run.name, config.security.keys, config.weights.host) == (value, Path(value), value)


def test_an_override_of_what_may_be_anything_stays_what_yaml_makes_of_it() -> None:
    assert load_config(DEMO, ["env.options.length=4"]).env.options["length"] == 4


@pytest.mark.parametrize("key", ["run.dir", "security.keys", "weights.folder", "rollout.engine.python"])
def test_a_path_may_begin_with_the_home_directory(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    value: object = load_config(DEMO, [f"{key}=~/here"])
    for name in key.split("."):
        value = getattr(value, name)
    assert value == tmp_path / "here"
