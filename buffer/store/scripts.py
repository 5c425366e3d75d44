"""The ledger's Lua scripts, and the names of its keys in Redis.

Each script in `lua/` is loaded with the prelude before it, the check of the calling learner where it needs one, and the
flags that tell Redis which commands it runs.
"""

from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
from redis.asyncio import Redis

NEEDS_MEMORY = ("issue", "evaluate", "evaluated")
"""Scripts that a full Redis refuses; all others either free memory or must run even then."""
READ_ONLY = ("verify", "steps", "snapshot", "room", "places")
"""Scripts without writes; Redis enforces it."""
LEARNER_ONLY = ("lease", "train", "publish", "throttle", "durable", "finish")
"""Scripts for the run's current learner only: the argument `learner` is its incarnation; empty skips the check."""


def run_prefix(run: str) -> str:
    """The prefix of every key of the run."""
    return f"{{slipstream:{run}}}"


def group_key(run: str, group_id: str) -> str:
    """The key under which a group's bytes are stored."""
    return f"{run_prefix(run)}:group:{group_id}"


class Scripts:
    """The scripts, on the keys of one run.

    Attributes:
        prefix: of these keys.
    """

    def __init__(self, redis: Redis, run: str) -> None:
        self.redis = redis
        self.prefix = run_prefix(run)
        self._scripts = {name: redis.register_script(text) for name, text in scripts().items()}

    async def call(self, name: str, *blobs: bytes | memoryview, **arguments: Any) -> Any:
        """Runs a script with named arguments, and bytes that JSON can't hold."""
        return await self._scripts[name](keys=[self.prefix], args=[msgspec.json.encode(arguments), *blobs])


@cache
def scripts() -> dict[str, str]:
    """The text of every script, by its name."""
    lua = [file for file in (files(__package__) / "lua").iterdir() if file.name.endswith(".lua")]
    texts = {file.name.removesuffix(".lua"): file.read_text(encoding="utf-8") for file in lua}
    prelude = texts.pop("prelude")
    return {name: f"#!lua{_flags(name)}\n{prelude}{_body(name, text)}" for name, text in texts.items()}


def _body(name: str, text: str) -> str:
    """The script inside a function, so that the counters are written wherever it returns."""
    check = "local refusal = check_learner(args.learner)\nif refusal then return refusal end\n"
    return (
        f"local function script()\n{text}end\n{check if name in LEARNER_ONLY else ''}"
        "local answer = script()\nwrite_counts()\nreturn answer\n"
    )


def _flags(name: str) -> str:
    if name in NEEDS_MEMORY:
        return ""
    return " flags=no-writes,allow-oom" if name in READ_ONLY else " flags=allow-oom"
