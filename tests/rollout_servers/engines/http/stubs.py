"""How the stub is started in the place of an engine's server."""

import sys
from pathlib import Path

from slipstream.rollout_servers.engines.http.server import Command
from tests.conftest import free_port
from tests.rollout_servers.engines.http import stub_server


def command(folder: Path, behaviour: str = "healthy") -> Command:
    """Its console is `folder`/logs/stub.engine.console."""
    port = free_port()
    return Command(
        name="the stub",
        arguments=[sys.executable, stub_server.__file__, str(port), behaviour],
        environment={"FOR_THE_STUB": "1"},
        port=port,
        health="/health",
        console=folder / "logs" / "stub.engine.console",
    )
