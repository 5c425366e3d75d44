"""The one password there is, and how mistakes that contain one are reported without it."""

import os
import re

from slipstream.configs.runtime.errors import ConfigError

REDIS_PASSWORD_VARIABLE = "SLIPSTREAM_REDIS_PASSWORD"

_IN_A_URL = re.compile(r"(://)\S*@")
_WITHOUT_A_SCHEME = re.compile(r"[^\s'\"=:]*:(?!//)\S*@")
_IN_A_KEY = re.compile(r"(passw(?:or)?d\w*['\"]?\s*[=:]\s*)\S+", re.IGNORECASE)


def redis_password() -> str | None:
    """Redis's password: only the environment has it, so that no file, command line or log does.

    Raises: ConfigError when it is no UTF-8, as which it is sent.
    """
    password = os.environ.get(REDIS_PASSWORD_VARIABLE) or None
    if password is not None and any("\udc80" <= letter <= "\udcff" for letter in password):
        raise ConfigError(f"{REDIS_PASSWORD_VARIABLE} holds bytes that are no UTF-8; choose another password")
    return password


def redact(text: str) -> str:
    """The text without what looks like a password in a URL, or like the value of a key for one."""
    without = _WITHOUT_A_SCHEME.sub("***@", _IN_A_URL.sub(r"\1***@", text))
    return _IN_A_KEY.sub(r"\1***", without)
