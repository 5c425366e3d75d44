"""The lookup task by smolagents' ToolCallingAgent: examples/agents/setup.sh smolagents, then

.agents/smolagents/bin/python examples/agents/smol.py runs/lookup_smolagents
"""

from typing import Any

from openai import DefaultHttpxClient
from outside import main
from smolagents import LogLevel, OpenAIModel, Tool, ToolCallingAgent
from table import parts, value_of

CONNECTIONS = DefaultHttpxClient(timeout=300)


class Lookup(Tool):  # type: ignore[misc]  # has no types
    """The tool of one task."""

    name = "lookup"
    description = "Looks a key up in the table of this task."
    inputs = {"key": {"type": "string", "description": "one digit"}}  # noqa: RUF012  # as smolagents wants it
    output_type = "string"

    def __init__(self, info: dict[str, Any]) -> None:
        super().__init__()
        self._info = info
        self.asked: list[str] = []

    def forward(self, key: str) -> str:
        """The value of a key."""
        self.asked.append(key)
        return value_of(self._info, key)


def play(session: dict[str, Any]) -> dict[str, float]:
    """One session."""
    task, info = session["task"]["prompt"], session["task"]["info"]
    model = OpenAIModel(
        session["model"], session["base_url"], session["api_key"], client_kwargs={"http_client": CONNECTIONS}
    )
    tool = Lookup(info)
    agent = ToolCallingAgent(tools=[tool], model=model, max_steps=2, verbosity_level=LogLevel.OFF)
    answer = agent.run(task)
    return parts(info, tool.asked, str(answer))


if __name__ == "__main__":
    main(play)
