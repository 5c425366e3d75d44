"""`slipstream keys new`."""

import os
import stat
from pathlib import Path

import pytest

from slipstream.buffer.wire.auth import client_keys, service_keys
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.weights import SecurityConfig
from slipstream.tools.keys import command, make_keys

FILES = {"client.key", "client.key_secret", "service.key", "service.key_secret"}
NEEDED = {
    "the buffer": ("service.key_secret", "client.key"),
    "a rollout server": ("client.key_secret", "service.key"),
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
    assert len(set(secrets(folder))) == 2
    assert not [secret for secret in secrets(folder) if secret in printed]


@pytest.mark.parametrize(("host", "read"), [("the buffer", service_keys), ("a rollout server", client_keys)])
def test_each_host_needs_only_the_named_files(tmp_path: Path, host: str, read: object) -> None:
    assert callable(read)
    make_keys(tmp_path / "all")
    (tmp_path / "host").mkdir()
    for name in NEEDED[host]:
        (tmp_path / "host" / name).write_bytes((tmp_path / "all" / name).read_bytes())
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
    service, client = service_keys(security), client_keys(security)
    assert service is not None and client is not None
    assert service.client == client.public
