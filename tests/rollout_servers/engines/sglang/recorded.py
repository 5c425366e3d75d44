"""What SGLang's server was asked and answered, as it was recorded."""

import json
from pathlib import Path
from typing import Any

from slipstream.rollout_servers.engines.sglang.protocol import Draft

_FOLDER = Path(__file__).parent / "answers"
ENDED_STREAMS = sorted(path.stem for path in _FOLDER.glob("stream_*.json") if path.stem != "stream_refused")


def recorded(name: str) -> Any:
    """A recording: `request`, and either its one `answer` or the `events` of its stream."""
    return json.loads((_FOLDER / f"{name}.json").read_text())


def answer(name: str) -> bytes:
    """The one answer of a recording, as it came."""
    return json.dumps(recorded(name)["answer"]).encode()


def draft(name: str, events: int | None = None) -> Draft:
    """What is made of a stream, or of its first events."""
    made = Draft()
    for event in recorded(name)["events"][:events]:
        made.take(json.dumps(event))
    return made
