"""The lookup task by mini-swe-agent, whose tool is bash: examples/agents/setup.sh mini-swe-agent, then

.agents/mini-swe-agent/bin/python examples/agents/mini.py runs/lookup_mini-swe-agent

The commands of the model run on this machine; this tiny one can write no others than `lookup` and `echo`.
"""

import os
from pathlib import Path
from typing import Any

os.environ |= {
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2",  # by default a run's end is noticed after minutes
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # fetches nothing
}

import litellm
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from openai import DefaultHttpxClient
from outside import main
from table import KEYS, parts, value_of

litellm.suppress_debug_info = True
litellm.client_session = DefaultHttpxClient(timeout=300)
COMMANDS = Path(__file__).parent / "bin"


def play(session: dict[str, Any]) -> dict[str, float]:
    """One session; the command `lookup` finds the table in its environment."""
    info = session["task"]["info"]
    table = " ".join(value_of(info, key) for key in KEYS)
    model = LitellmModel(
        model_name=f"openai/{session['model']}",
        model_kwargs={"api_base": session["base_url"], "api_key": session["api_key"]},
        cost_tracking="ignore_errors",
        observation_template="{{ output.output }}",
    )
    bash = LocalEnvironment(env={"PATH": f"{COMMANDS}:/usr/bin:/bin", "TABLE": table})
    agent = DefaultAgent(
        model, bash, system_template="You have bash.", instance_template="{{ task }}", step_limit=2,
        max_consecutive_format_errors=1,
    )  # fmt: skip
    answer = agent.run(session["task"]["prompt"])["submission"].strip()
    actions = [action for message in agent.messages for action in message.get("extra", {}).get("actions", ())]
    asked = [action["command"].removeprefix("lookup ") for action in actions if "lookup" in action["command"]]
    return parts(info, asked, answer)


if __name__ == "__main__":
    main(play)
