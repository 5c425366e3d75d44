"""`slipstream keys new`."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.buffer.wire.auth import client_keys, service_keys
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.weights import SecurityConfig
from slipstream.tools import keys
from slipstream.tools.keys import make_keys

FILES = {"client.key", "client.key_secret", "service.key", "service.key_secret"}


def slipstream(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slipstream.tools.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def secrets(folder: Path) -> list[str]:
    return [file.read_text().partition("secret-key")[2].strip(' ="\n') for file in folder.glob("*_secret")]


def test_the_command_makes_keys_and_says_who_needs_which_without_showing_any(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "keys"
    done = slipstream("keys", "new", folder)
    assert done.returncode == 0, done.stderr
    assert {file.name for file in folder.iterdir()} == FILES
    assert f"security.keys={folder}" in done.stdout
    for line in ("the buffer *service.key_secret client.key$", "a rollout server *client.key_secret service.key$"):
        assert any(matches(line, said) for said in done.stdout.splitlines()), line
    assert len(set(secrets(folder))) == 2
    assert [secret for secret in secrets(folder) if secret in done.stdout] == []


def matches(line: str, said: str) -> bool:
    who, _, files = line.removesuffix("$").partition(" *")
    return said.split() == [*who.split(), *files.split()]


@pytest.mark.parametrize("umask", [0o000, 0o022])
@pytest.mark.parametrize("existing", [False, True])
def test_only_the_user_may_read_them_whatever_the_umask(tmp_path: Path, umask: int, existing: bool) -> None:
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


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    before = secrets(tmp_path / "keys")
    done = slipstream("keys", "new", tmp_path / "keys")
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path / 'keys'} is not empty, and keys are never overwritten: " + (
        "name another folder\n"
    )
    assert secrets(tmp_path / "keys") == before


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"can't make keys in {tmp_path / 'file' / 'keys'}"):
        make_keys(tmp_path / "file" / "keys")


def test_two_folders_hold_different_keys_and_each_pair_fits_the_other(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_keys(tmp_path / name)
    assert not set(secrets(tmp_path / "a")) & set(secrets(tmp_path / "b"))
    security = SecurityConfig(keys=tmp_path / "a")
    service, client = service_keys(security), client_keys(security)
    assert service is not None and client is not None
    assert service.client == client.public


def test_what_a_host_is_told_to_copy_is_all_that_it_needs(tmp_path: Path) -> None:
    make_keys(tmp_path / "all")
    for host, files, read in (
        ("buffer", ("service.key_secret", "client.key"), service_keys),
        ("rollout", ("client.key_secret", "service.key"), client_keys),
    ):
        (tmp_path / host).mkdir()
        for name in files:
            (tmp_path / host / name).write_bytes((tmp_path / "all" / name).read_bytes())
        assert read(SecurityConfig(keys=tmp_path / host)) == read(SecurityConfig(keys=tmp_path / "all"))


def test_without_a_command_the_help_is_pointed_at() -> None:
    with pytest.raises(SystemExit) as ended:
        keys.command([])
    assert ended.value.code == 2
