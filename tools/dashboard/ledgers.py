"""Access to the ledgers of runs: a worker process for each, started when it is first asked for, and kept."""

import asyncio
import sys
import time
from collections import OrderedDict
from contextlib import suppress
from typing import Any, Final

import msgspec
from anyio.to_thread import run_sync

from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.tools.dashboard.runs import Run

MOST_WORKERS: Final = 4
"""Each may have a copy of a ledger in memory; the one that was used longest ago ends."""
DEADLINE_S: Final = 120.0
LINE_BYTES: Final = 256 << 20
"""Most bytes of an answer."""
CLOSE_S: Final = 5.0
KEPT_S: Final = 5.0
"""An answer about the whole ledger is given again for so long."""


class LedgerError(SlipstreamError):
    """The ledger has no such thing, or can't be read; the message has the reason."""


class Ledgers:
    """The workers of all runs."""

    def __init__(self) -> None:
        self._workers: OrderedDict[tuple[str, float | None], _Worker] = OrderedDict()
        self._kept: dict[tuple[str, str], tuple[float, Any]] = {}

    async def ask(self, run: Run, call: str, **arguments: Any) -> Any:
        """The answer of the run's worker. Raises: LedgerError."""
        trainer = await run_sync(lambda: run.trainer)
        if trainer != "rl":
            raise LedgerError(f"run {run.id} has no ledger: a training of the kind {trainer} has no buffer")
        # A copy is that of one end of the run: it may be continued.
        ended_at = await run_sync(lambda: None if run.state == "running" else run.updated_at)
        key = run.id, ended_at
        worker = self._workers.pop(key, None)
        if worker is None or worker.has_ended:
            worker = _Worker(run)
        self._workers[key] = worker
        while len(self._workers) > MOST_WORKERS:
            _, oldest = self._workers.popitem(last=False)
            await oldest.close()
        return await worker.ask({"call": call, **arguments})

    async def account(self, run: Run) -> Any:
        """The account of the run's tokens. Raises: LedgerError."""
        known = self._kept.get((run.id, "account"))
        if known is None or time.monotonic() - known[0] > KEPT_S:
            known = self._kept[run.id, "account"] = time.monotonic(), await self.ask(run, "account")
        return known[1]

    async def close(self) -> None:
        """Ends all workers."""
        await asyncio.gather(*(worker.close() for worker in self._workers.values()))
        self._workers.clear()


class _Worker:
    """One process; answers one request at a time."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._process: asyncio.subprocess.Process | None = None
        self._reason: str | None = None
        """Why the process ended, once that is known."""
        self._lock = asyncio.Lock()
        self._asking: set[asyncio.Task[Any]] = set()

    @property
    def has_ended(self) -> bool:
        """True once its process has ended."""
        return self._process is not None and self._process.returncode is not None

    async def ask(self, request: dict[str, Any]) -> Any:
        """The answer. Raises: LedgerError when there is none, or not in time."""
        # Shielded: the answer to a request that was given up must be read before the next one is written.
        asking = asyncio.create_task(self._ask(request))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        try:
            answer = await asyncio.wait_for(asyncio.shield(asking), DEADLINE_S)
        except TimeoutError:
            raise LedgerError(
                f"the ledger of run {self._run.id} did not answer within {DEADLINE_S:.0f} s: it is large, and is being "
                "loaded; ask again"
            ) from None
        if "error" in answer:
            raise LedgerError(answer["error"])
        return answer["answer"]

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        async with self._lock:
            if self._reason is not None:  # while this request waited for the lock
                return {"error": self._reason}
            process = self._process or await self._start()
            assert process.stdin is not None, "a pipe"
            assert process.stdout is not None, "a pipe"
            if not process.stdin.is_closing():
                with suppress(ConnectionError):
                    process.stdin.write(msgspec.json.encode(request) + b"\n")
                    await process.stdin.drain()
            line = await process.stdout.readline()
            if line.endswith(b"\n"):
                answer: dict[str, Any] = msgspec.json.decode(line)
                return answer
            self._reason = await self._exit_reason(process)
            return {"error": self._reason}

    async def _exit_reason(self, process: asyncio.subprocess.Process) -> str:
        """The errors that the process printed, or its exit code."""
        assert process.stderr is not None, "a pipe"
        printed = (await process.stderr.read()).decode(errors="replace").strip()
        code = await process.wait()
        reasons = [text.removeprefix("error: ") for text in printed.splitlines() if text.startswith("error: ")]
        return "; ".join(reasons) or printed[-2000:] or f"the process that reads the ledger ended with exit code {code}"

    async def _start(self) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "slipstream.tools.dashboard.ledger_worker"),
            str(self._run.folder.root),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
            start_new_session=True,  # Ctrl-C must not reach it: it ends with its stdin
        )
        return self._process

    async def close(self) -> None:
        """Ends the process and what it started."""
        if self._asking:
            await asyncio.wait(self._asking, timeout=CLOSE_S)
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None, "a pipe"
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), CLOSE_S)
        except TimeoutError:
            process.terminate()
            await process.wait()
