"""Passwords are refused in configurations, and never repeated in messages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.passwords import REDIS_PASSWORD_VARIABLE, redact, redis_password
from slipstream.configs.schema import RunConfig
from tests.configs.conftest import DEMO, problems_of

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
def test_url_with_a_password_is_refused_with_the_remedy(url: str) -> None:
    (problem,) = problems_of(DEMO, f"redis.url={url}")
    assert REDIS_PASSWORD_VARIABLE in problem
    assert SECRET not in problem


@pytest.mark.parametrize(
    "text",
    [
        f"redis.url=http://:{SECRET}@host", f"redis.url=user:{SECRET}@host:6379", f"redis.url=redis:{SECRET}@host",
        f"redis.url=:{SECRET}@host", f"redis=user:{SECRET}@host", f"redis=[user:{SECRET}@host]",
        f"redis.url=[user:{SECRET}@host", f"redis.url=[redis://:{SECRET}@host]", f"redis=redis://:{SECRET}@host",
        f"redis.password={SECRET}", f"redis.url.password={SECRET}", f"redis.url.x=redis://:{SECRET}@host",
        f"buffer.redis=redis://:{SECRET}@host", f"redis.url=[redis://:{SECRET}@host", f"redis://:{SECRET}@host",
    ],
)  # fmt: skip
def test_password_in_the_wrong_place_is_not_repeated(text: str) -> None:
    overrides = ["redis.url=redis://host", text] if ".url." in text else [text]
    assert SECRET not in "\n".join(problems_of(DEMO, *overrides))


def test_password_in_broken_yaml_is_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"redis: {{url: redis://:{SECRET}@host, password: {SECRET}, [\n")
    (problem,) = problems_of(tmp_path / "run.yaml")
    assert "YAML" in problem
    assert SECRET not in problem


def test_pydantic_does_not_repeat_a_password() -> None:
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate({"model": {"build": "digits"}, "redis": {"url": f"redis://:{SECRET}@host"}})
    assert SECRET not in str(caught.value)


def test_printed_configuration_holds_no_password(tmp_path: Path) -> None:
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
        ("rewards.0.options.api_key=x auth-token: y", "rewards.0.options.api_key=*** auth-token: ***"),
        ("max_tokens=5, 3 secret tokens", "max_tokens=5, 3 secret tokens"),
    ],
)
def test_passwords_are_redacted(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize("password", [b"\xff", b"a\xe9b", "\N{GRINNING FACE}".encode() + b"\xff"])
def test_only_utf_8_passwords_are_accepted(password: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REDIS_PASSWORD_VARIABLE, os.fsdecode(password))
    with pytest.raises(ConfigError, match=REDIS_PASSWORD_VARIABLE) as caught:
        redis_password()
    assert os.fsdecode(password) not in str(caught.value)
    for accepted in ("", "p@ss word", "p\u00e4ss", "\N{GRINNING FACE}"):
        monkeypatch.setenv(REDIS_PASSWORD_VARIABLE, accepted)
        assert redis_password() == (accepted or None)
