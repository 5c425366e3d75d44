"""The Redis password, secrets that a process does not need, and the redaction of passwords in error messages."""

import os
import re
from typing import Final

from slipstream.configs.runtime.errors import ConfigError

REDIS_PASSWORD_VARIABLE = "SLIPSTREAM_REDIS_PASSWORD"
LEARNERS_SECRETS: Final = (
    *(REDIS_PASSWORD_VARIABLE, "SWANLAB_API_KEY", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
)
"""Variables with secrets that a learner may need, and a rollout server never."""

_URL_CREDENTIALS = re.compile(r"(://)\S*@")
_BARE_CREDENTIALS = re.compile(r"[^\s'\"=:]*:(?!//)\S*@")
_PASSWORD_KEY = re.compile(
    r"((?:passw(?:or)?d|secret|(?:api|access|auth)[_-]?(?:key|token))\w*['\"]?\s*[=:]\s*)\S+", re.IGNORECASE
)


def redis_password() -> str | None:
    """Redis's password, from the environment alone: no file, command line or log contains it.

    Raises: ConfigError when it is not UTF-8, the encoding in which it is sent.
    """
    password = os.environ.get(REDIS_PASSWORD_VARIABLE) or None
    if password is not None and any("\udc80" <= letter <= "\udcff" for letter in password):
        raise ConfigError(f"{REDIS_PASSWORD_VARIABLE} holds bytes that are no UTF-8; choose another password")
    return password


def drop_learners_secrets() -> None:
    """Removes them from the environment of this process and of those that it starts."""
    for name in LEARNERS_SECRETS:
        os.environ.pop(name, None)


def redact(text: str) -> str:
    """The text with `***` for anything like a password in a URL or the value of a password key."""
    without = _BARE_CREDENTIALS.sub("***@", _URL_CREDENTIALS.sub(r"\1***@", text))
    return _PASSWORD_KEY.sub(r"\1***", without)
