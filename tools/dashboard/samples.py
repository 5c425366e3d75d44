"""Samples of a run: their list with search, order and filters, and one with its tokens and their values."""

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from slipstream.buffer.wire.codec import action_mask, behaviour_logprobs, token_ids
from slipstream.buffer.wire.messages import Trajectory
from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.schema.model import ModelConfig
from slipstream.learner.metrics.samples import Sample, read_file
from slipstream.models.folder import Decode, text_decoder
from slipstream.tools.dashboard.columns import numbers
from slipstream.tools.dashboard.runs import Run, Runs
from slipstream.tools.follow import Record
from slipstream.tools.transcript import decoder_or_reason, stretches, token_texts

EXCERPT: Final = 240
"""Characters."""
MOST_ROWS: Final = 500
MOST_TEXT: Final = 64 << 20
"""Characters of decoded texts that are kept, over all runs."""
PROMPTS: Final = 100
_FILE: Final = re.compile(r"(step|eval)-(\d{1,12})\.msgpack")
_ID: Final = re.compile(r"(step|eval)-(\d{1,12})-(\d{1,4})")
_ORDERS: Final[Mapping[str, str]] = {
    "reward": "reward", "staleness": "staleness", "tokens": "tokens", "step": "number",
}  # fmt: skip


class UnknownSample(SlipstreamError):
    """There is no such sample."""


@dataclass(frozen=True)
class Selection:
    """A choice of samples, and their order.

    Attributes:
        query: a text that prompt or answer contains, in any case.
        sort: `reward`, `staleness`, `tokens` or `step`, with `-` descending.
        equal: values of `chosen`, `task` and `env`; empty ones are not compared.
        first: the first step, or evaluated version.
        last: the last one.
    """

    kind: str = "step"
    query: str = ""
    sort: str = "step"
    equal: Mapping[str, str] = field(default_factory=dict)
    first: float = -math.inf
    last: float = math.inf
    offset: int = 0
    limit: int = MOST_ROWS


@dataclass(frozen=True)
class Row:
    """A sample in the list.

    Attributes:
        facts: what the list shows.
        text: prompt and answer.
        answer_at: where the answer begins in it.
    """

    facts: Record
    text: str
    answer_at: int


class Samples:
    """The samples of all runs. Decoded texts are kept, within a bound."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._files: OrderedDict[tuple[Path, int], list[Row]] = OrderedDict()
        """By path and time of change."""
        self._characters = 0
        self._lock = Lock()

    def search(self, run: Run, selection: Selection) -> Record:
        """A page of the chosen samples, `{"total", "samples", "note"}`; `note` is why there is no text, or empty."""
        decode, note = decoder(run)
        wanted = selection.query.casefold()
        version_of = self._runs.version_of(run)
        found = [
            (_with_staleness(row.facts, version_of), row)
            for path, number in _files(run.folder, selection.kind)
            if selection.first <= number <= selection.last
            for row in self._rows(path, decode)
            if all(not value or str(row.facts[name]) == value for name, value in selection.equal.items())
            and wanted in row.text.casefold()
        ]
        key = _ORDERS.get(selection.sort.removeprefix("-"), "number")
        known = [one for one in found if one[0][key] is not None]
        known.sort(key=lambda one: one[0][key], reverse=selection.sort.startswith("-"))
        ordered = known + [one for one in found if one[0][key] is None]
        shown = [
            {**facts, "excerpt": _excerpt(row, wanted)} for facts, row in ordered[selection.offset :][: selection.limit]
        ]
        return {"total": len(ordered), "samples": shown, "note": note}

    def one(self, run: Run, sample_id: str) -> Record:
        """A sample with its tokens. Raises: UnknownSample."""
        match = _ID.fullmatch(sample_id)
        samples = read_file(run.folder.samples / f"{match[1]}-{int(match[2]):09d}.msgpack") if match else []
        index = int(match[3]) if match else 0
        if index >= len(samples):
            raise UnknownSample(f"run {run.id} has no sample {sample_id!r}: the list shows those that were kept")
        decode, note = decoder(run)
        row = _row(samples[index], index, decode)
        return {
            **_with_staleness(row.facts, self._runs.version_of(run)),
            "excerpt": _excerpt(row, ""),
            "note": note,
            "stretches": stretches_of(samples[index].trajectory, decode, _values(samples[index])),
        }

    def prompts(self, run: Run, limit: int) -> list[Record]:
        """Tasks that were sampled at several steps, those with most samples first."""
        by_task: dict[tuple[str, Any], list[Row]] = {}
        decode, _ = decoder(run)
        for kind in ("step", "eval"):
            for path, _ in _files(run.folder, kind):
                for row in self._rows(path, decode):
                    if (task := row.facts["task"]) is not None:
                        by_task.setdefault((kind, task), []).append(row)
        tasks = []
        for (kind, task), rows in by_task.items():
            steps = sorted({row.facts["number"] for row in rows})
            if len(steps) > 1:
                tasks.append({
                    "kind": kind,
                    "task": task,
                    "env": rows[0].facts["env"],
                    "samples": len(rows),
                    "first": steps[0],
                    "last": steps[-1],
                    "excerpt": rows[0].text[: min(rows[0].answer_at, EXCERPT)],
                })  # fmt: skip
        return sorted(tasks, key=lambda task: (-task["samples"], task["first"]))[:limit]

    def _rows(self, path: Path, decode: Decode) -> list[Row]:
        """The samples of a file."""
        try:
            key = path, path.stat().st_mtime_ns
        except OSError:  # removed meanwhile
            return []
        with self._lock:
            if key in self._files:
                self._files.move_to_end(key)
                return self._files[key]
        rows = [_row(sample, index, decode) for index, sample in enumerate(read_file(path))]
        with self._lock:
            if key not in self._files:
                self._files[key] = rows
                self._characters += sum(len(row.text) for row in rows)
            while self._characters > MOST_TEXT and len(self._files) > 1:
                _, dropped = self._files.popitem(last=False)
                self._characters -= sum(len(row.text) for row in dropped)
        return rows


def decoder(run: Run) -> tuple[Decode, str]:
    """The decoder of a run's tokens, or one that writes their ids and the reason why."""
    if (run.folder.export / "tokenizer.json").is_file():
        return text_decoder(run.folder.export), ""
    config = run.config()
    model = config.get("model") if isinstance(config, dict) else None
    path, revision = (model.get("path"), model.get("revision")) if isinstance(model, dict) else (None, None)
    # Not validated: another release may have written it.
    model = ModelConfig.model_construct(path=None if path is None else Path(str(path)), revision=revision)
    decode, reason = decoder_or_reason(run.folder, model)
    return decode or ids_as_text, reason


def ids_as_text(ids: Sequence[int]) -> str:
    """The ids, where there is no tokenizer."""
    return "".join(f"{number} " for number in ids)


def stretches_of(
    trajectory: Trajectory, decode: Decode, values: Mapping[str, NDArray[Any]] = MappingProxyType({})
) -> list[Record]:
    """Prompt, actions and observations, each with columns of its tokens.

    Args:
        values: further columns of all tokens, which those of the actions get.
    """
    ids = token_ids(trajectory)
    versions = np.full(len(ids), np.nan)
    for span in trajectory.spans:
        versions[span.start : span.end] = span.version
    columns = {"version": versions, "logprob": behaviour_logprobs(trajectory), **values}
    texts = token_texts(ids.tolist(), decode)
    parts = []
    for stretch in stretches(trajectory, decode):
        part = slice(stretch.start, stretch.end)
        shown = columns if stretch.role == "action" else {}
        parts.append({
            "role": stretch.role,
            "start": stretch.start,
            "versions": list(stretch.versions),
            "text": stretch.text,
            "tokens": {
                "text": texts[part],
                "id": ids[part].tolist(),
                **{name: numbers(np.asarray(column[part], dtype=np.float64)) for name, column in shown.items()},
            },
        })  # fmt: skip
    return parts


def _values(sample: Sample) -> dict[str, NDArray[Any]]:
    """The per-token columns that the sample has."""
    columns = {
        "ratio": sample.ratio, "advantage": sample.advantage, "trained": sample.trained, "entropy": sample.entropy,
    }  # fmt: skip
    return {name: column for name, column in columns.items() if column is not None}


def _row(sample: Sample, index: int, decode: Decode) -> Row:
    trajectory = sample.trajectory
    ids, mask = token_ids(trajectory), action_mask(trajectory)
    start = int(np.argmax(mask))
    prompt, answer = decode(ids[:start].tolist()), decode(ids[start:].tolist())
    facts = {
        "id": f"{sample.kind}-{sample.number:09d}-{index}",
        "kind": sample.kind,
        "number": sample.number,
        "chosen": sample.chosen,
        "group_id": sample.group_id or None,
        "answer": sample.answer,
        "task": sample.task,
        "env": sample.env or None,
        **facts_of(trajectory),
    }
    return Row(facts, prompt + answer, len(prompt))


def facts_of(trajectory: Trajectory) -> Record:
    """Reward, scores, number of generated tokens and the end of a trajectory."""
    return {
        "reward": trajectory.reward,
        "scores": trajectory.scores,
        "tokens": int(np.count_nonzero(action_mask(trajectory))),
        "oldest_version": min((span.version for span in trajectory.spans), default=None),
        "finish_reason": trajectory.finish_reason,
    }


def _with_staleness(facts: Record, version_of: Callable[[int], float]) -> Record:
    """The facts with how many versions its oldest token was behind when the step began; None if it is unknown."""
    staleness, oldest = math.nan, facts["oldest_version"]
    if facts["kind"] == "step" and oldest is not None:
        staleness = version_of(facts["number"]) - oldest
    return facts | {"staleness": None if math.isnan(staleness) else int(max(0.0, staleness))}


def _excerpt(row: Row, wanted: str) -> str:
    """The part of the text around what was searched, or the beginning of the answer."""
    at = row.text.casefold().find(wanted) if wanted else -1
    start = row.answer_at if at < 0 else max(0, at - EXCERPT // 4)
    return row.text[start : start + EXCERPT]


def _files(folder: RunPaths, kind: str) -> list[tuple[Path, int]]:
    """The files of a kind with their step or version, ascending."""
    found = ((path, _FILE.fullmatch(path.name)) for path in folder.samples.glob("*.msgpack"))
    return sorted(
        ((path, int(match[2])) for path, match in found if match and match[1] == kind), key=lambda file: file[1]
    )
