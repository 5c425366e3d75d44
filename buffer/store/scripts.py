"""The Lua scripts in `lua/`, as Redis is given them: each with the prelude before it, what is done after it, and
what it may do."""

from functools import cache
from importlib.resources import files

NEEDS_MEMORY = ("issue", "evaluate", "evaluated")
"""What a Redis that is full refuses; everything else either frees memory or must go on all the same."""
LOOKS_ONLY = ("verify", "steps", "standing")
"""Redis itself sees to it that these write nothing."""
LEARNER_ONLY = ("lease", "train", "publish", "throttle", "durable", "finish")
"""Scripts for the run's present learner only. Their argument `learner` says who asks; empty, nobody is refused."""


@cache
def scripts() -> dict[str, str]:
    """The text of every script, by its name."""
    lua = [file for file in (files(__package__) / "lua").iterdir() if file.name.endswith(".lua")]
    texts = {file.name.removesuffix(".lua"): file.read_text(encoding="utf-8") for file in lua}
    prelude = texts.pop("prelude")
    return {name: f"#!lua{_flags(name)}\n{prelude}{_body(name, text)}" for name, text in texts.items()}


def _body(name: str, text: str) -> str:
    """The script, whom it is for, and what is done after it wherever it returns."""
    check = "local stranger = stranger(args.learner)\nif stranger then return stranger end\n"
    return (
        f"local function script()\n{text}end\n{check if name in LEARNER_ONLY else ''}"
        "local answer = script()\nwrite_counts()\nreturn answer\n"
    )


def _flags(name: str) -> str:
    if name in NEEDS_MEMORY:
        return ""
    return " flags=no-writes,allow-oom" if name in LOOKS_ONLY else " flags=allow-oom"
