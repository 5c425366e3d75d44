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
    new = commands.add_parser("new", help="make one key pair each for buffer, learner and rollout servers")
    new.add_argument("folder", type=Path, metavar="FOLDER", help="a new or empty folder")
    folder: Path = parser.parse_args(argv).folder
    make_keys(folder)
    print(_instructions(folder))
    return 0


def make_keys(folder: Path) -> None:
    """Makes the key pairs, readable by the user alone.

    Raises: ConfigError when the folder is not empty, or can't be made.
    """
    # Imported here: the command line answers without it.
    import zmq.auth

    from slipstream.buffer.wire.auth import BUFFER, LEARNER, ROLLOUT

    previous = os.umask(0o077)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty, and keys are never overwritten: name another folder")
        folder.chmod(0o700)
        for name in (BUFFER, LEARNER, ROLLOUT):
            zmq.auth.create_certificates(folder, name)
    except OSError as error:
        raise ConfigError(f"can't make keys in {folder}: {error.strerror}; name another folder") from None
    finally:
        os.umask(previous)


def _instructions(folder: Path) -> str:
    from slipstream.buffer.wire.auth import BUFFER, LEARNER, ROLLOUT, public_file, secret_file

    hosts = {BUFFER: "the buffer", LEARNER: "the learner", ROLLOUT: "a rollout server"}
    rows = []
    for own, host in hosts.items():
        others = [public_file(folder, other).name for other in hosts if other != own]
        rows.append(f"  {host:<25}" + " ".join([secret_file(folder, own).name, *others]))
    return "\n".join([
        f"Keys are in {folder}. A _secret file grants access to the run: copy it by ssh only, never commit it.",
        "",
        f"  {'host of':<25}needs in its folder",
        *rows,
        "",
        f"On every host set security.keys to that folder: security.keys={folder.resolve()}",
    ])  # fmt: skip
