"""The embedded Redis server of a run on a cluster: `python -P -m slipstream.tools.clusters.redis_server CONFIG …`.

It listens at the host and port of `redis.url`, and keeps its data in the run's folder, which all nodes see.
"""

import os
import sys
from urllib.parse import urlsplit

from slipstream.configs.arguments import exit_code, parse_run_arguments
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.network import is_loopback
from slipstream.configs.runtime.passwords import REDIS_PASSWORD_VARIABLE, redis_password
from slipstream.tools.launch.redis import redis_command


def main() -> None:
    """Entry point: becomes the server. Exits with 2 on mistakes in the configuration."""
    sys.exit(exit_code(_serve))


def _serve() -> int:
    config = parse_run_arguments("Run the embedded Redis server of a run on a cluster.")
    url = urlsplit(config.redis.address)
    if url.scheme != "redis" or url.hostname is None or url.port is None:
        raise ConfigError(f"redis.url={config.redis.url} must look like redis://host:port/0: the server listens there")
    if redis_password() is None and not is_loopback(url.hostname):
        raise ConfigError(
            f"{REDIS_PASSWORD_VARIABLE} must hold a password: hosts of {url.hostname}'s network can connect"
        )
    redis = config.redis.model_copy(update={"port": url.port})
    command = redis_command(redis, config.paths.redis, bind=url.hostname)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
