"""A reward as users write them: each answer is sent to a service, without a limit of time."""

import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.request import Request, urlopen

ADDRESS = "REWARD_SERVICE"
"""Environment variable with the service's address."""


def correct(answer: str, reference: str, info: Mapping[str, Any]) -> float:
    body = json.dumps({"answer": answer, "reference": reference}).encode()
    with urlopen(Request(os.environ[ADDRESS], body)) as reply:
        return float(json.load(reply)["score"])
