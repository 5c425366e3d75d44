"""A small env behind OpenEnv's own server; runs in the environment that setup.sh makes.

python server.py PORT SESSIONS
"""

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):  # type: ignore[misc]
    number: int


class Hint(Observation):  # type: ignore[misc]
    text: str


class GuessEnv(Environment):  # type: ignore[misc]
    """Guess a number from 0 to 99; 13 makes it raise."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._secret = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        self._secret = random.Random(seed).randrange(100)
        return Hint(text=f"Guess a number; it is {self._secret % 10} modulo 10.")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        if action.number == 13:
            raise RuntimeError("unlucky")
        if action.number == self._secret:
            return Hint(text="right", done=True, reward=1.0)
        return Hint(text="higher" if action.number < self._secret else "lower", reward=-0.1)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    port, sessions = map(int, sys.argv[1:])
    app = create_fastapi_app(GuessEnv, Guess, Hint, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
