"""The embedded Redis server of a run on a cluster: `python -P -m slipstream.tools.clusters.redis_server CONFIG …`.

It listens at the port of `redis.url` on the buffer's address. Its data are in the run's folder, which all nodes see.
"""

import os
import sys
from urllib.parse import urlsplit

from slipstream.configs.arguments import exit_code, read_run_arguments, run_parser
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.network import is_loopback
from slipstream.configs.runtime.passwords import REDIS_PASSWORD_VARIABLE, redis_password
from slipstream.tools.launch.redis import redis_command


def main() -> None:
    """Entry point: becomes the server. Exits with 2 on mistakes in the configuration."""
    sys.exit(exit_code(_serve))


def _serve() -> int:
    _, config = read_run_arguments(run_parser("Run the embedded Redis server of a run on a cluster."))
    url, bind = urlsplit(config.redis.address), urlsplit(config.buffer.bind).hostname
    if url.scheme != "redis" or url.port is None or bind is None:
        raise ConfigError(
            f"redis.url={config.redis.url} must look like redis://host:port/0, and buffer.bind={config.buffer.bind} "
            "like tcp://address:port: the server listens at that port of this address"
        )
    if redis_password() is None and not is_loopback(bind):
        raise ConfigError(f"{REDIS_PASSWORD_VARIABLE} must hold a password: other hosts can connect to {bind}")
    command = redis_command(config.redis.model_copy(update={"port": url.port}), config.paths.redis, bind=bind)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
