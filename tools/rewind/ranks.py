"""Replays of a run with several learner ranks: one process for each on this machine.

`python -m slipstream.tools.rewind.ranks FOLDER FD` is one of them; rank 0 writes the steps to the file descriptor FD.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Final

import msgspec

from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.configs.runtime.logging import configure_logging
from slipstream.configs.runtime.processes import die_with_parent
from slipstream.configs.runtime.signals import restore_default_sigint
from slipstream.learner.cli import end_process
from slipstream.learner.parallel.mesh import join_world
from slipstream.learner.parallel.watchdog import watch_ranks
from slipstream.tools.clusters.roles import rank_environment
from slipstream.tools.launch.ports import choose_ports
from slipstream.tools.rewind.recording import Recording
from slipstream.tools.rewind.session import ReplayedStep, Request, Session

REQUEST: Final = "request.json"
STATES: Final = "states"
RANK_DEADLINE_S: Final = 60.0
"""Silence after which a rank counts as dead."""
ENDING_S: Final = 10.0


@dataclass(frozen=True)
class Order:
    """The task of the ranks."""

    run: str
    request: Request


PROBLEMS: Final = "problems"
MISTAKE: Final = "mistake"
"""Keys of an error of rank 0: its texts, and true for a ConfigError."""


def replay_on_ranks(recording: Recording, request: Request, ranks: int) -> Iterator[ReplayedStep]:
    """As `Session.replay`, in so many processes. Raises: as there, and SlipstreamError when a process fails."""
    with tempfile.TemporaryDirectory(prefix="slipstream-replay-") as name, ExitStack() as cleanup:
        folder = Path(name)
        (folder / STATES).mkdir()
        (folder / REQUEST).write_bytes(msgspec.json.encode(Order(str(recording.folder.root.absolute()), request)))
        reading, writing = os.pipe()
        results = cleanup.enter_context(os.fdopen(reading, "rb"))
        port = choose_ports(1)
        processes = [_start(folder, writing, rank=rank, ranks=ranks, port=port) for rank in range(ranks)]
        for process in processes:
            cleanup.callback(_stop, process)
        os.close(writing)
        yield from _read(results)
        for process in processes:
            process.wait()
    if codes := [process.returncode for process in processes if process.returncode]:
        raise SlipstreamError(f"a rank of the replay ended with exit code {codes[0]}: see its output above")


def _start(folder: Path, writing: int, *, rank: int, ranks: int, port: int) -> subprocess.Popen[bytes]:
    environment = rank_environment(rank=rank, ranks=ranks, per_node=ranks, host="127.0.0.1", port=port)
    return subprocess.Popen(
        [sys.executable, "-m", "slipstream.tools.rewind.ranks", str(folder), str(writing)],
        env=os.environ | environment,
        pass_fds=[writing] if rank == 0 else [],
        preexec_fn=die_with_parent(),  # noqa: PLW1509 - it makes one system call
    )


def _read(results: IO[bytes]) -> Iterator[ReplayedStep]:
    """The steps that rank 0 writes. Raises: its error."""
    for line in results:
        content = json.loads(line)
        if PROBLEMS in content:
            raise (ConfigError if content[MISTAKE] else SlipstreamError)(content[PROBLEMS])
        yield ReplayedStep(**content)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(folder: Path, results: int) -> None:
    """One rank."""
    restore_default_sigint()
    order = msgspec.json.decode((folder / REQUEST).read_bytes(), type=Order)
    rank = int(os.environ["RANK"])
    configure_logging(f"replay-{rank}", level="warning", folder=None)
    with os.fdopen(results, "w") if rank == 0 else Path(os.devnull).open("w") as output:
        try:
            with Recording.open(order.run) as recording:
                world = join_world(recording.config(order.request.last).learner.parallel)
                with watch_ranks(world, deadline_s=RANK_DEADLINE_S):
                    for step in Session(recording, world, folder / STATES).replay(order.request):
                        # Python's JSON has NaN.
                        print(json.dumps(asdict(step)), file=output, flush=True)
        except SlipstreamError as error:
            print(json.dumps({PROBLEMS: error.problems, MISTAKE: isinstance(error, ConfigError)}), file=output)
    end_process(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
