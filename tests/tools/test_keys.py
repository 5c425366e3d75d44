"""`slipstream keys new`."""

import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from slipstream.buffer.wire.auth import (
    BUFFER,
    CLIENTS,
    LEARNER,
    ROLLOUT,
    ClientKeys,
    ServiceKeys,
    client_keys,
    service_keys,
)
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.weights import SecurityConfig
from slipstream.tools.keys import command, make_keys

FILES = {f"{name}.key{suffix}" for name in ("buffer", "learner", "rollout") for suffix in ("", "_secret")}
NEEDED = {
    "the buffer": ("buffer.key_secret", "learner.key", "rollout.key"),
    "the learner": ("learner.key_secret", "buffer.key", "rollout.key"),
    "a rollout server": ("rollout.key_secret", "buffer.key", "learner.key"),
}
READ: dict[str, list[Callable[[SecurityConfig], ServiceKeys | ClientKeys | None]]] = {
    "the buffer": [partial(service_keys, name=BUFFER)],
    "the learner": [partial(service_keys, name=LEARNER), partial(client_keys, name=LEARNER, service=BUFFER)],
    "a rollout server": [partial(client_keys, name=ROLLOUT, service=service) for service in (BUFFER, LEARNER)],
}


def secrets(folder: Path) -> list[str]:
    return [file.read_text().partition("secret-key")[2].strip(' ="\n') for file in folder.glob("*_secret")]


def test_command_prints_who_needs_which_key_and_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command([])
    folder = tmp_path / "a" / "keys"
    assert command(["new", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert {file.name for file in folder.iterdir()} == FILES
    assert f"security.keys={folder}" in printed
    rows = [line.split() for line in printed.splitlines()]
    assert all([*host.split(), *files] in rows for host, files in NEEDED.items())
    assert len(set(secrets(folder))) == 3
    assert not [secret for secret in secrets(folder) if secret in printed]


@pytest.mark.parametrize("host", NEEDED)
def test_each_host_needs_only_the_named_files(tmp_path: Path, host: str) -> None:
    make_keys(tmp_path / "all")
    (tmp_path / "host").mkdir()
    for name in NEEDED[host]:
        (tmp_path / "host" / name).write_bytes((tmp_path / "all" / name).read_bytes())
    for read in READ[host]:
        assert read(SecurityConfig(keys=tmp_path / "host")) == read(SecurityConfig(keys=tmp_path / "all"))


@pytest.mark.parametrize("umask", [0o000, 0o022])
@pytest.mark.parametrize("existing", [False, True])
def test_only_the_user_can_read_keys(tmp_path: Path, umask: int, existing: bool) -> None:
    folder = tmp_path / "keys"
    before = os.umask(umask)
    try:
        if existing:
            folder.mkdir()
        make_keys(folder)
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.iterdir()]}
    assert modes == {"keys": 0o700} | dict.fromkeys(FILES, 0o600)


def test_existing_keys_and_unusable_folders_are_refused(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    before = secrets(tmp_path / "keys")
    with pytest.raises(ConfigError, match=str(tmp_path / "keys")):
        make_keys(tmp_path / "keys")
    assert secrets(tmp_path / "keys") == before
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=str(tmp_path / "file" / "keys")):
        make_keys(tmp_path / "file" / "keys")


def test_keys_differ_and_the_pairs_match(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_keys(tmp_path / name)
    assert not set(secrets(tmp_path / "a")) & set(secrets(tmp_path / "b"))
    security = SecurityConfig(keys=tmp_path / "a")
    for service, names in CLIENTS.items():
        listening = service_keys(security, service)
        clients = [client_keys(security, name, service=service) for name in names]
        assert listening is not None
        assert list(listening.clients) == [client.public for client in clients if client is not None]
