"""Environments of `verifiers`, in a Python of their own: their packages exclude versions that are needed here."""

import asyncio
import json
import queue
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.processes import guarded_command
from slipstream.configs.schema.base import expand_home
from slipstream.env.adapters import verifiers_worker
from slipstream.env.base import AgentEndpoint, AgentReward, EnvFailed, Split, Task

RETRY_S: Final = 10.0
"""After a failed start, episodes fail without another attempt for so long."""
STOP_S: Final = 10.0
TASK_S: Final = 60.0
SHOWN_CHARACTERS: Final = 500
KEPT_CHARACTERS: Final = 4096
"""End of what the process printed that is kept for its error."""


class Verifiers:
    """An environment of Prime Intellect's `verifiers`, whose rollouts call the policy through the gateway.

    One process for each rollout server plays them; it is started again when it has ended.

    Args:
        environment: name of an installed environment (a module with `load_environment`), or of a taskset of
            `verifiers.v1`.
        python: interpreter of the virtual environment that has it.
        arguments: those of `load_environment`; of a taskset verifiers' section `env`.
        concurrency: rollouts at a time, of each rollout server.
        start_deadline_s: time to import the packages and read the rows.

    Raises: ConfigError when it can't be loaded, or has no rows.
    """

    from_outside = False
    needs_reward = True

    def __init__(
        self,
        environment: str,
        python: str,
        arguments: Mapping[str, Any] | None = None,
        concurrency: int = 64,
        start_deadline_s: float = 300.0,
    ) -> None:
        if not isinstance(concurrency, int) or concurrency < 1:
            raise ConfigError(f"env verifiers: concurrency={concurrency!r} must be a whole number from 1")
        self._settings = {"environment": environment, "arguments": dict(arguments or {})}
        self._python = str(expand_home(Path(python)))
        self._start_deadline_s = start_deadline_s
        self._places = asyncio.Semaphore(concurrency)
        self._starting = threading.Lock()
        self._failed_at = float("-inf")
        try:
            self._worker = _Worker(self._python, self._settings, start_deadline_s)
        except EnvFailed as error:
            raise ConfigError(f"env verifiers: environment {environment!r} can't be loaded: {error}") from None
        self._sizes: dict[str, int] = self._worker.described["sizes"]
        self._fingerprint: str = self._worker.described["fingerprint"]
        if not self._sizes["train"]:
            raise ConfigError(f"env verifiers: environment {environment!r} has no rows to train on")

    def size(self, split: Split) -> int:
        """Number of rows in the split."""
        return self._sizes[split]

    def task(self, split: Split, index: int) -> Task:
        """The row at `index`. Raises: IndexError unless 0 <= index < size(split), EnvFailed."""
        if not 0 <= index < self.size(split):
            raise IndexError(f"env verifiers: {split} row {index} does not exist; there are {self.size(split)}")
        worker = self._live()
        try:
            row = worker.ask("task", split=split, index=index)[1].result(TASK_S)
        except TimeoutError:
            worker.close()  # it is busy or hangs, and its rollouts with it: the next task starts another one
            raise EnvFailed(f"no task within {TASK_S:g} s: the process was ended") from None
        return Task(row["prompt"], row["reference"], {**row["info"], "split": split, "index": index})

    def fingerprint(self) -> str:
        """Hash of the package's version, the arguments and the rows."""
        return self._fingerprint

    async def run_agent(self, task: Task, endpoint: AgentEndpoint) -> AgentReward:
        """One rollout. Raises: EnvFailed."""
        model = {"url": endpoint.base_url, "key": endpoint.api_key, "name": endpoint.model}
        async with self._places:
            worker = await asyncio.to_thread(self._live)
            number, answer = worker.ask("play", split=task.info["split"], index=task.info["index"], model=model)
            try:
                result = await asyncio.wrap_future(answer)
            except asyncio.CancelledError:
                worker.stop(number)
                raise
        return AgentReward(result["reward"], result["metrics"])

    def close(self) -> None:
        """Ends the process."""
        self._worker.close()

    def _live(self) -> "_Worker":
        """The process, started again if it has ended. Raises: EnvFailed."""
        with self._starting:
            if not self._worker.has_ended:
                return self._worker
            if time.monotonic() < self._failed_at + RETRY_S:
                raise EnvFailed(f"the process of environment {self._settings['environment']!r} does not start again")
            try:
                self._worker = _Worker(self._python, self._settings, self._start_deadline_s)
            except EnvFailed:
                self._failed_at = time.monotonic()
                raise
            return self._worker


class _Worker:
    """The process that plays.

    Attributes:
        described: `sizes` by split and `fingerprint`.
        has_ended: nothing is answered any more.
    """

    def __init__(self, python: str, settings: Mapping[str, Any], deadline_s: float) -> None:
        """Starts it. Raises: EnvFailed."""
        self.has_ended = False
        self._printed = ""
        self._number = 0
        self._numbering = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._requests = queue.SimpleQueue[Mapping[str, Any] | None]()
        command = guarded_command(
            [python, "-P", "-u", verifiers_worker.__file__], f"SLIPSTREAM_VERIFIERS={uuid.uuid4().hex}"
        )
        if shutil.which(python) is None:
            raise EnvFailed(f"python={python!r} is no program")
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace")
        assert self._process.stdin and self._process.stdout and self._process.stderr, "they are pipes"
        self._threads = [
            threading.Thread(target=target, args=[file], name="verifiers", daemon=True)
            for target, file in (
                (self._write, self._process.stdin),
                (self._read, self._process.stdout),
                (self._keep, self._process.stderr),
            )
        ]
        for thread in self._threads:
            thread.start()
        self._waiting[0] = first = Future[Any]()
        self._requests.put(settings)
        try:
            self.described = first.result(deadline_s)
        except TimeoutError:
            self.close()
            raise EnvFailed(f"not ready within {deadline_s:g} s") from None
        except BaseException:  # raised again, an interrupt too
            self.close()
            raise

    def ask(self, do: str, **request: Any) -> tuple[int, "Future[Any]"]:
        """Number and future answer of a request."""
        answer: Future[Any] = Future()
        with self._numbering:
            self._number += 1
            number = self._number
            if self.has_ended:
                answer.set_exception(EnvFailed(self._end()))
            else:
                self._waiting[number] = answer
                self._requests.put({"id": number, "do": do, **request})
        return number, answer

    def stop(self, number: int) -> None:
        """Cancels a request."""
        self._waiting.pop(number, None)
        self._requests.put({"id": number, "do": "stop"})

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()  # with all that it has started: it is guarded
        for thread in self._threads:
            thread.join(STOP_S)

    def _write(self, file: IO[str]) -> None:
        """In a thread of its own: a process that is busy may not read."""
        with suppress(BrokenPipeError), file:
            while (request := self._requests.get()) is not None:
                file.write(json.dumps(request, default=str) + "\n")
                file.flush()

    def _read(self, file: IO[str]) -> None:
        with file:
            for line in file:
                try:
                    answer = json.loads(line)
                except ValueError:
                    answer = None
                if isinstance(answer, dict) and not answer.keys().isdisjoint(("result", "error")):
                    self._settle(answer)
                else:  # what an interpreter prints before the program begins
                    self._printed = (self._printed + line)[-KEPT_CHARACTERS:]
        self._process.wait()
        with self._numbering:
            self.has_ended = True
            self._requests.put(None)
            left, self._waiting = self._waiting, {}
        for waiting in left.values():
            if waiting.set_running_or_notify_cancel():
                waiting.set_exception(EnvFailed(self._end()))

    def _settle(self, answer: Mapping[str, Any]) -> None:
        waiting = self._waiting.pop(answer.get("id", 0), None)
        if waiting is None or not waiting.set_running_or_notify_cancel():
            return  # it was cancelled
        if "error" in answer:
            waiting.set_exception(EnvFailed(answer["error"]))
        else:
            waiting.set_result(answer["result"])

    def _keep(self, file: IO[str]) -> None:
        with file:
            for line in file:
                self._printed = (self._printed + line)[-KEPT_CHARACTERS:]

    def _end(self) -> str:
        shown = self._printed.strip()[-SHOWN_CHARACTERS:]
        return f"its process ended with code {self._process.returncode}: {shown}"
