"""`slipstream keys new`: the CURVE keys that encrypt and authenticate a run's connections."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from slipstream.configs.runtime.errors import ConfigError


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream keys`; returns 0.

    Raises: ConfigError when the folder is not empty, or can't be made.
    """
    parser = argparse.ArgumentParser(
        prog="slipstream keys", description="Make the keys that encrypt a run's connections (docs/security.md)."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="new")
    new = commands.add_parser("new", help="make one key pair for the services and one for their clients")
    new.add_argument("folder", type=Path, metavar="FOLDER", help="a new or empty folder")
    folder: Path = parser.parse_args(argv).folder
    make_keys(folder)
    print(_instructions(folder))
    return 0


def make_keys(folder: Path) -> None:
    """Makes both key pairs, readable by the user alone.

    Raises: ConfigError when the folder is not empty, or can't be made.
    """
    # Imported here: the command line answers without it.
    import zmq.auth

    from slipstream.buffer.wire.auth import CLIENT, SERVICE

    previous = os.umask(0o077)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty, and keys are never overwritten: name another folder")
        folder.chmod(0o700)
        for name in (SERVICE, CLIENT):
            zmq.auth.create_certificates(folder, name)
    except OSError as error:
        raise ConfigError(f"can't make keys in {folder}: {error.strerror}; name another folder") from None
    finally:
        os.umask(previous)


def _instructions(folder: Path) -> str:
    from slipstream.buffer.wire.auth import CLIENT, SERVICE, public_file, secret_file

    service, service_secret = public_file(folder, SERVICE).name, secret_file(folder, SERVICE).name
    client, client_secret = public_file(folder, CLIENT).name, secret_file(folder, CLIENT).name
    return f"""Keys are in {folder}. A _secret file grants access to the run: copy it by ssh only, never commit it.

  host of                  needs in its folder
  the buffer               {service_secret} {client}
  a rollout server         {client_secret} {service}
  the learner              {service_secret} {client} {client_secret} {service}

On every host set security.keys to that folder: security.keys={folder.resolve()}"""
