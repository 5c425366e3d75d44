"""A Redis server for one test, whose memory and disk can be limited, and which can be killed and restarted."""

import resource
import signal
import subprocess
from types import TracebackType
from typing import Self

from slipstream.buffer.store.redis import connect
from slipstream.configs import RunConfig
from slipstream.tools.launch.redis import redis_command, wait_until_ready

READY_S = 60.0


class OwnRedis:
    """The embedded server of `config`, started as `slipstream up` starts it."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Starts it on the files in its folder; returns once it answers."""
        self.process = subprocess.Popen(
            redis_command(self._config.redis, self._config.paths.redis),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Python ignores SIGXFSZ: so must the server, to which a file at its limit is then a full disk.
            restore_signals=False,
        )
        wait_until_ready(self._config.redis, READY_S)

    def kill(self) -> None:
        """Kills it; the kernel keeps the data that was written."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(READY_S)

    def used_bytes(self) -> int:
        """Memory in use."""
        with connect(self._config.redis) as client:
            return int(client.info("memory")["used_memory"])

    def limit_memory(self, size_bytes: int) -> None:
        """Largest `used_bytes` at which it accepts writes; 0: no limit."""
        with connect(self._config.redis) as client:
            client.config_set("maxmemory", size_bytes)

    def evicted(self) -> int:
        """Keys evicted for lack of memory."""
        with connect(self._config.redis) as client:
            return int(client.info("stats")["evicted_keys"])

    def fill_disk(self) -> None:
        """Stops the growth of all files."""
        sizes = [file.stat().st_size for file in self._config.paths.redis.rglob("*") if file.is_file()]
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (max(sizes), resource.RLIM_INFINITY))

    def make_room_on_disk(self) -> None:
        """Lets files grow again."""
        no_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, no_limit)
