"""No password is taken from a configuration, and none that is put there by mistake is repeated."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from slipstream.configs import load
from slipstream.configs.load import load_config
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.passwords import REDIS_PASSWORD_VARIABLE, redact, redis_password
from slipstream.configs.schema import RunConfig
from tests.configs.conftest import problems_of

DEMO = Path(load.__file__).parent / "demo.yaml"
SECRET = "hunter2"


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}@host:6379/0",
        f"rediss://user:{SECRET}@host/0",
        f"redis://:{SECRET}/with@slash@host/0",
        f"redis://host/0?password={SECRET}",
        f"unix:///run/redis.sock?ssl_password={SECRET}",
    ],
)
def test_a_password_in_the_url_is_refused_with_the_remedy_and_not_repeated(url: str) -> None:
    (problem,) = problems_of(DEMO, f"redis.url={url}")
    assert "redis.url must not hold a password" in problem
    assert REDIS_PASSWORD_VARIABLE in problem
    assert SECRET not in problem


@pytest.mark.parametrize(
    "url", [f"http://:{SECRET}@host", f"user:{SECRET}@host:6379", f"redis:{SECRET}@host", f":{SECRET}@host"]
)
def test_a_url_of_another_kind_is_refused_and_not_repeated(url: str) -> None:
    assert problems_of(DEMO, f"redis.url={url}") == ("redis: redis.url must start with redis://, rediss:// or unix://",)


@pytest.mark.parametrize(
    "text",
    [
        f"redis=user:{SECRET}@host",
        f"redis=[user:{SECRET}@host]",
        f"redis.url=[user:{SECRET}@host",
        f"redis.url=[redis://:{SECRET}@host]",
        f"redis=redis://:{SECRET}@host",
        f"redis.password={SECRET}",
        f"redis.url.password={SECRET}",
        f"redis.url.x=redis://:{SECRET}@host",
        f"buffer.redis=redis://:{SECRET}@host",
        f"redis.url=[redis://:{SECRET}@host",
        f"redis://:{SECRET}@host",
    ],
)
def test_a_password_in_the_wrong_place_is_not_repeated(text: str) -> None:
    overrides = ["redis.url=redis://host", text] if ".url." in text else [text]
    assert SECRET not in "\n".join(problems_of(DEMO, *overrides))


def test_a_password_in_broken_yaml_is_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"redis: {{url: redis://:{SECRET}@host, password: {SECRET}, [\n")
    (problem,) = problems_of(tmp_path / "run.yaml")
    assert "not valid YAML" in problem
    assert SECRET not in problem


def test_pydantic_does_not_repeat_it_either() -> None:
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate({"model": {"build": "digits"}, "redis": {"url": f"redis://:{SECRET}@host"}})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["redis://host:6379/0", "redis://[::1]?db=2", "rediss://user@host/0", "unix:///run/redis.sock?db=1"]
)
def test_a_url_without_a_password_is_taken(url: str) -> None:
    assert load_config(DEMO, [f"redis.url={url}"]).redis.address == url


@pytest.mark.parametrize("url", ["h:notaport/0", "h:99999/0", "h:0", "h/abc", "h?db=abc", "h/0?db=-1", "[::1"])
def test_a_url_with_a_port_or_a_database_that_is_none_is_refused(url: str) -> None:
    (problem,) = problems_of(DEMO, f"redis.url=redis://{url}")
    assert f"redis.url=redis://{url} must look like redis://host:port/db" in problem


@pytest.mark.parametrize("url", ["redis://h:6379/3", "redis://h?db=3", "unix:///run/redis.sock"])
def test_a_url_that_no_cluster_has_is_refused_for_one(url: str) -> None:
    (problem,) = problems_of(DEMO, "redis.cluster=true", f"redis.url={url}")
    assert f"redis.url={url} names no node of a cluster" in problem


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["redis.url=redis://h/0?ssl_cert_reqs=none"], "redis.url has the parameters ssl_cert_reqs, but only db"),
        (["redis.ca_file=ca.crt"], "redis.ca_file is for TLS, but redis.url does not start with rediss://"),
        (["redis.url=redis://h", "redis.key_file=k"], "redis.key_file is for TLS"),
        (["redis.url=rediss://h", "redis.cert_file=c"], "redis.cert_file and redis.key_file belong together"),
    ],
)
def test_settings_of_tls_that_would_be_without_effect_are_refused(overrides: list[str], problem: str) -> None:
    assert problem in "\n".join(problems_of(DEMO, *overrides))


def test_the_printed_configuration_names_the_keys_but_holds_neither_keys_nor_the_password(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "slipstream.tools.cli", "up", str(DEMO), f"security.keys={tmp_path}", "--print-config",
    ]  # fmt: skip
    environment = {REDIS_PASSWORD_VARIABLE: SECRET, "PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    assert f"keys: {tmp_path}" in done.stdout
    assert SECRET not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("can't reach redis://u:p@h:1/0 or redis://:q@i", "can't reach redis://***@h:1/0 or redis://***@i"),
        ("redis://h:1/0 is fine", "redis://h:1/0 is fine"),
        ("{'url': 'u:p@h:1'} or redis=u:p:q@i", "{'url': '***@h:1'} or redis=***@i"),
        ("password: x", "password: ***"),
        ("{'redis_password': 'x'}", "{'redis_password': ***"),
    ],
)
def test_what_looks_like_a_password_is_taken_out_of_a_text(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize("password", [b"\xff", b"a\xe9b", "\N{GRINNING FACE}".encode() + b"\xff"])
def test_a_password_that_is_no_utf_8_is_refused_and_not_repeated(
    password: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REDIS_PASSWORD_VARIABLE, os.fsdecode(password))
    with pytest.raises(ConfigError, match=f"^{REDIS_PASSWORD_VARIABLE} holds bytes that are no UTF-8; choose another"):
        redis_password()


@pytest.mark.parametrize("password", ["", "p@ss word", "p\u00e4ss", "\N{GRINNING FACE}"])
def test_any_other_password_is_taken_as_it_is(password: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REDIS_PASSWORD_VARIABLE, password)
    assert redis_password() == (password or None)
