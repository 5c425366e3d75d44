"""`slipstream report`: runs as one self-contained HTML file, the dashboard's page with its data inside."""

import argparse
import asyncio
import base64
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.files import write_atomically
from slipstream.tools.cli import at_least, new_file, printable
from slipstream.tools.dashboard.columns import MOST_POINTS
from slipstream.tools.dashboard.command import places
from slipstream.tools.dashboard.ledgers import LedgerError, Ledgers
from slipstream.tools.dashboard.runs import Run, Runs, catalogue, compare
from slipstream.tools.dashboard.samples import PROMPTS, Samples, Selection
from slipstream.tools.follow import json_bytes

PAGE: Final = Path(__file__).parent / "page"
SAMPLES: Final = 64
"""Of each kind and run, the latest."""
GROUPS: Final = 200
SERIES_BYTES: Final = 3 << 20
"""Of the curves of all runs; they are thinned to fit."""
DATA_BYTES: Final = 4_700_000
"""Of everything; tokens of samples are left out, the oldest first, until it fits. With the page: below 5 MB."""
EVENTS: Final = 1000
"""Of each run, the latest."""
NUMBER_BYTES: Final = 10
"""About what a number of a curve takes."""
LEAST_POINTS: Final = 50
_SHEET: Final = re.compile(r'<link rel="stylesheet" href="([^"]+)">')
_SCRIPT: Final = re.compile(r'<script src="([^"]+)"></script>')


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream report`; returns 0.

    Raises: ConfigError when there is no such run, or the file can't be written.
    """
    parser = argparse.ArgumentParser(
        prog="slipstream report",
        description="Write runs as one HTML file that opens without a network or a server: configuration, curves, "
        "account, samples, warnings, versions.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs, or names under runs/")
    parser.add_argument(
        "-o", "--out", type=new_file, default=Path("report.html"), metavar="FILE", help="default: report.html"
    )
    parser.add_argument(
        "--samples", type=at_least(0), default=SAMPLES, metavar="N", help=f"of each kind and run; default: {SAMPLES}"
    )
    arguments = parser.parse_args(argv)
    runs = Runs(places(arguments.runs))
    if not runs.all():
        raise ConfigError(f"{', '.join(arguments.runs)}: no run's folder, which holds config.yaml, and none below")
    data = _within(asyncio.run(answers(runs, samples=arguments.samples)))
    try:
        write_atomically(arguments.out, [page(data)])
    except OSError as error:
        raise ConfigError(f"{arguments.out} can't be written: {error.strerror}") from None
    print(f"{arguments.out}: {', '.join(run.id for run in runs.all())}, {arguments.out.stat().st_size / 1e6:.1f} MB")
    return 0


async def answers(runs: Runs, *, samples: int = SAMPLES) -> dict[str, Any]:
    """The server's answers about these runs, by their path below `/api/`, as the page asks for them."""
    chosen = runs.all()
    found: dict[str, Any] = {
        "runs": [run.overview() for run in chosen],
        "metrics": catalogue(),
        "compare": {"keys": compare(chosen)},
    }
    ledgers, stored = Ledgers(), Samples(runs)
    try:
        for run in chosen:
            of_run = _of_files(runs, run, share=SERIES_BYTES // len(chosen))
            of_run |= _of_samples(run, stored, samples) | await _of_ledger(run, ledgers)
            found |= {f"runs/{run.id}{path}": answer for path, answer in of_run.items()}
    finally:
        await ledgers.close()
    return found


def _of_files(runs: Runs, run: Run, *, share: int) -> dict[str, Any]:
    """The contents of a run's files, with curves of about `share` bytes."""
    columns = len(runs.series(run, points=1)["columns"])
    points = max(LEAST_POINTS, min(MOST_POINTS, share // (max(1, columns) * NUMBER_BYTES)))
    return {
        "": run.detail(),
        "/series": runs.series(run, points=points),
        "/series?kind=eval": runs.series(run, kind="eval", points=points),
        "/events": run.events()[-EVENTS:],
        "/servers": run.servers(),
        "/servers?history=1": run.servers_history(points),
    }


def _of_samples(run: Run, stored: Samples, most: int) -> dict[str, Any]:
    """Lists, and the samples in them with their tokens."""
    listed = []
    for kind in ("step", "eval"):
        listed += stored.search(run, Selection(kind=kind, sort="-step", limit=most))["samples"]
    found: dict[str, Any] = {"/samples": {"total": len(listed), "samples": listed}}
    found |= {f"/samples/{row['id']}": stored.one(run, row["id"]) for row in listed}
    kept = {(row["kind"], row["task"]) for row in listed}
    prompts = [task for task in stored.prompts(run, PROMPTS) if (task["kind"], task["task"]) in kept]
    found["/prompts"] = prompts
    for task in prompts:
        same = [row for row in listed if row["task"] == task["task"] and row["kind"] == task["kind"]]
        variant = "?kind=eval" if task["kind"] == "eval" else ""
        found[f"/prompts/{task['task']}{variant}"] = {"total": len(same), "samples": same}
    return found


async def _of_ledger(run: Run, ledgers: Ledgers) -> dict[str, Any]:
    """Account and groups; where there is no ledger, or it can't be read, they are not contained."""
    if run.trainer != "rl":
        return {}
    try:
        return {"/account": await ledgers.account(run), "/groups": await ledgers.ask(run, "groups", limit=GROUPS)}
    except LedgerError as error:
        print(printable(f"note: the report has no account and groups of run {run.id}: {error}"))
        return {}


def _within(data: dict[str, Any]) -> dict[str, Any]:
    """The data without the tokens of samples, of as many as make it too large: of each run the oldest first."""
    sizes = {path: len(json_bytes(answer)) for path, answer in data.items()}
    ranks: dict[str, int] = {}
    counts = Counter[str]()
    for path in data:
        run, is_sample, _ = path.partition("/samples/")
        if is_sample:
            ranks[path] = counts[run]  # the lists begin with the latest
            counts[run] += 1
    excess = sum(sizes.values()) - DATA_BYTES
    for path in sorted(ranks, key=ranks.__getitem__, reverse=True):
        if excess > 0:
            excess -= sizes[path]
            del data[path]
    return data


def page(data: Mapping[str, Any]) -> bytes:
    """The page with sheets, scripts and data inside; nothing else may run in it, and it may load nothing."""
    text = (PAGE / "index.html").read_text(encoding="utf-8")
    # In a script's content, "<" could begin a closing tag or a comment.
    embedded = json_bytes(data).decode().replace("<", "\\u003c")
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def inside(tag: str, name: str) -> str:
        content = (PAGE / name).read_text(encoding="utf-8")
        hashes[tag].append(f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'")
        return f"<{tag}>{content}</{tag}>"

    text = _SHEET.sub(lambda found: inside("style", found[1]), text)
    text = _SCRIPT.sub(lambda found: inside("script", found[1]), text)
    policy = "; ".join([
        "default-src 'none'", "img-src data:", *(f"{tag}-src {' '.join(of_tag)}" for tag, of_tag in hashes.items()),
    ])  # fmt: skip
    head = f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    text = text.replace('<meta charset="utf-8">', head, 1)
    data_script = f'<script type="application/json" id="data">{embedded}</script>\n<script>'
    return text.replace("<script>", data_script, 1).encode()
