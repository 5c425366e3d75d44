"""CURVE keys: which files of `security.keys` a process reads, and what may be wrong with them.

Everything that binds (buffer, the learner's control plane) shares one key pair, every client (rollout servers, the
learner towards the buffer) another.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth

from slipstream.configs.errors import ConfigError
from slipstream.configs.logs import get_log
from slipstream.configs.schema.security import SecurityConfig

log = get_log("wire.curve")

SERVICE = "service"
CLIENT = "client"

Z85_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True)
class ServiceKeys:
    """Of a socket that binds; z85 text."""

    secret: bytes = field(repr=False)
    client: bytes
    """The public key that a client must prove to own."""


@dataclass(frozen=True)
class ClientKeys:
    """Of a socket that connects; z85 text."""

    public: bytes
    secret: bytes = field(repr=False)
    service: bytes
    """The public key that the service must prove to own."""


def public_file(folder: Path, name: str) -> Path:
    """The file with the public key of a pair."""
    return folder / f"{name}.key"


def secret_file(folder: Path, name: str) -> Path:
    """The file with both keys of a pair."""
    return folder / f"{name}.key_secret"


def service_keys(security: SecurityConfig) -> ServiceKeys | None:
    """What a socket that binds needs, None without `security.keys`.

    Raises: ConfigError naming the file that is missing or wrong.
    """
    if security.keys is None:
        return None
    _, secret = _pair(secret_file(security.keys, SERVICE))
    return ServiceKeys(secret=secret, client=_public(public_file(security.keys, CLIENT)))


def client_keys(security: SecurityConfig) -> ClientKeys | None:
    """What a socket that connects needs, None without `security.keys`.

    Raises: ConfigError naming the file that is missing or wrong.
    """
    if security.keys is None:
        return None
    public, secret = _pair(secret_file(security.keys, CLIENT))
    return ClientKeys(public=public, secret=secret, service=_public(public_file(security.keys, SERVICE)))


def _public(file: Path) -> bytes:
    public, _ = _read(file)
    if not Z85_KEY.fullmatch(public):
        raise _wrong(file, "its public key is none")
    return public


def _pair(file: Path) -> tuple[bytes, bytes]:
    public, secret = _read(file)
    if secret is None:
        raise _wrong(file, "it holds no secret key")
    if not Z85_KEY.fullmatch(secret) or zmq.curve_public(secret) != public:
        raise _wrong(file, "its secret key does not belong to its public key")
    if file.stat().st_mode & 0o077:
        log.warning("others may read a secret key", file=str(file), remedy=f"chmod 600 {file}")
    return public, secret


def _read(file: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(file)
    except ValueError:
        raise _wrong(file, "it holds no public key") from None
    except PermissionError:
        raise ConfigError(f"security.keys: {file} can't be read: give it to the user of this process") from None
    except OSError as error:
        if file.exists():
            raise ConfigError(f"security.keys: {file} can't be read: {error.strerror or error}") from None
        raise ConfigError(
            f"security.keys: there is no {file}; copy it from the folder that `slipstream keys new` made"
        ) from None


def _wrong(file: Path, what: str) -> ConfigError:
    return ConfigError(
        f"security.keys: {file} is no key file of this kind: {what}; copy it again from the folder that "
        "`slipstream keys new` made"
    )
