"""Folders of runs as the learner writes them: a small one, and one of any length with hostile texts throughout."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.configs.load import create_run_folder
from slipstream.learner.metrics.samples import ActionColumns, SampleStore, Source
from slipstream.models.folder import initial_model
from slipstream.models.tiny import TEXT
from tests.tools.run_command import demo_config

HOSTILE: Final = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
HOSTILE_TEXT: Final = "<script>alert(1)</script>\x1b[31m\x00\u2028\ud800"
"""HTML, a terminal's escape sequence, NUL, a line end of JavaScript, and a half of a surrogate pair."""
STARTED_S: Final = 1_790_000_000.0
SAMPLED_STEPS: Final = 40
TASKS: Final = 5
KINDS: Final = ("throttle", "restart", "warning")
"""Of events."""


def append(path: Path, *records: Mapping[str, Any]) -> None:
    """Appends records to a file of JSON lines."""
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


# --- a small run ------------------------------------------------------------------------------------------------------


def step(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "kind": "step", "time_s": float(number), "step": number, "steps": 9, "policy_version": number // 2,
        "reward": number / 10, "score/exact_match": 0.5, **fields,
    }  # fmt: skip


def evaluation(version: int, score: float) -> dict[str, Any]:
    return {"kind": "eval", "time_s": version + 0.5, "step": 2 * version + 1, "policy_version": version, "score": score}


def make_run(folder: Path, name: str, *overrides: str) -> RunConfig:
    """A run's folder with 4 steps, 2 evaluations, samples of both, events, servers, versions and a warning."""
    config = demo_config(folder, f"run.name={name}", *overrides)
    paths = config.paths
    create_run_folder(paths, config)
    initial_model(config)
    append(paths.metrics, evaluation(0, 0.0), *map(step, range(1, 5)), evaluation(1, 0.25))
    append(paths.root / "events.jsonl", {"time_s": 1.0, "step": 2, "kind": "throttle", "text": HOSTILE_TEXT})
    append(
        paths.logs / "learner.jsonl", {"event": HOSTILE_TEXT, "level": "warning", "timestamp": "2026-01-01T00:00:00Z"}
    )
    server = {"server": "r0", "version": 1, "lag": 1, "idle_fraction": 0.5, "tokens_per_s": 1234.0}
    (paths.root / "servers.json").write_text(json.dumps({"time_s": 1.0, "step": 4, "version": 2, "servers": [server]}))
    append(paths.root / "servers.jsonl", *({"time_s": 10.0 * n, "tokens_per_s": n} for n in range(3)))
    (paths.root / "run.json").write_text(json.dumps([{"started_at": 1000.5, "packages": {"torch": "2.13.0"}}]))
    store = SampleStore(paths.samples, env="digits")
    for number in (1, 3):
        answers = [answer([7, 7, number], 0.0), answer([3, number, 5], 1.0)]
        store.keep("step", number, answers, [Source("12", 5)] * 2, actions={index: columns() for index in range(2)})
    store.keep("eval", 1, [answer([5, 5], 0.5)])
    return config


def answer(ids: list[int], reward: float) -> m.Trajectory:
    """An answer to the prompt 5, 4, 3, 13; its first token is of version 0, the others are of version 2."""
    whole, mask = [5, 4, 3, 13, *ids], [0] * 4 + [1] * len(ids)
    return _trajectory(whole, mask, np.full(len(whole), -0.5), {0: 5, 2: len(whole)}, reward, {"exact_match": reward})


def columns() -> ActionColumns:
    """Of three actions, the last of which is not trained on."""
    values = np.array([1.0, 2.0, 0.5], dtype="<f4").tobytes()
    return ActionColumns(ratio=values, advantage=values, trained=np.array([1, 1, 0], "<f4").tobytes(), entropy=values)


# --- a run of any length ----------------------------------------------------------------------------------------------


def run_config(folder: Path, name: str, *, port: int, lr: float = 1e-6) -> RunConfig:
    """The configuration of a run in `folder`, with its Redis at a port."""
    return RunConfig.model_validate(
        {
            "run": {"name": name, "dir": str(folder / "runs")},
            "model": {"build": "text"},
            "redis": {"port": port, "fsync": "always"},
            "rollout": {"group_size": 2},
            "learner": {"groups_per_step": 2, "optimizer": {"lr": lr}},
            "buffer": {"max_staleness": 20},
        }
    )


def write_run(config: RunConfig, *, steps: int, servers: int) -> None:
    """Writes the folder of a run, without its ledger."""
    create_run_folder(config.paths, config)
    initial_model(config)
    root = config.paths.root
    records = [step_record(step, steps) for step in range(1, steps + 1)]
    for version in range(0, steps, max(1, steps // 20)):
        records.insert(min(version * 2, len(records)), _evaluation(version, steps))
    append(config.paths.metrics, *records)
    (root / "servers.json").write_text(json.dumps(servers_record(steps, servers)))
    append(
        root / "servers.jsonl",
        *(
            {"time_s": 10.0 * i, "step": 8 * i, "server_count": servers, "tokens_per_s": 900.0 * servers, "lag_max": 1}
            for i in range(30)
        ),
    )
    append(root / "events.jsonl", *(event(steps // 3 + i, kind) for i, kind in enumerate(KINDS)))
    start = {
        "started_at": STARTED_S, "command": f"slipstream up {HOSTILE}", "folder": HOSTILE, "python": "3.11.7",
        "packages": {"torch": "2.13.0"}, "git": {"commit": "4d793dd9", "changed": True},
        "machine": {"cpu": HOSTILE, "cores": 2, "memory_bytes": 24_000_000_000, "gpus": []},
    }  # fmt: skip
    (root / "run.json").write_text(json.dumps([start]))
    warning = {"timestamp": "2026-11-27T12:00:00Z", "level": "warning", "event": HOSTILE, "logger": "learner"}
    append(config.paths.logs / "learner.jsonl", warning)
    _write_samples(config, steps)


def step_record(step: int, steps: int, **changes: float) -> dict[str, Any]:
    """The record of a step."""
    share = step / max(1, steps)
    return {
        "kind": "step", "time_s": 10 + 0.5 * step, "step": step, "steps": steps, "policy_version": step // 2,
        "reward": share, "reward_std": 0.3 * (1 - share), f"score/{HOSTILE}": share, "groups_without_spread": share / 2,
        "answer_tokens": 120.0 + 40 * share, "answers_cut_off": 0.1, "ended/stop": 0.9, "staleness_mean": 1.2,
        "staleness_max": 2.0, "staleness_in_flight": 0.4, "staleness_in_queue": 0.8, "loss": -0.1,
        "entropy": 3 * (1 - share) + 0.1, "ess": 0.9 + 0.05 * math.sin(step), "kl_k1": 1e-4, "clip_fraction": 0.01,
        "masked_fraction": 0.002,
        "mismatch_abs": 2e-7, "lr": 1e-6, "grad_norm": 0.5, "wait_s": 0.2, "train_s": 0.3, "step_s": 0.5,
        "learner_idle_fraction": 0.6, "generator_idle_fraction": 0.05, "tokens_generated_per_s": 9000.0,
        "weight_sync_s": 0.08, "generation_stall_s": 0.02, "groups_in_flight_limit": 64, "engine_deaths": 0,
        "buffer/issued": 32 * step + 96, "buffer/in_flight": 64, "buffer/ready": 20, "buffer/leased": 12,
        "buffer/trained": 30 * step, "buffer/filtered": step, "buffer/expired": step, "buffer/reissued": 0,
        "buffer/answers_dropped/stale": 8 * step, f"buffer/length_bias/{HOSTILE}": 0.12,
        "buffer/length_bias/trained": 0.02,
        **changes,
    }  # fmt: skip


def _evaluation(version: int, steps: int) -> dict[str, Any]:
    return {
        "kind": "eval",
        "time_s": 10 + version,
        "step": 2 * version,
        "policy_version": version,
        "score": version / steps,
        "score_interval": 0.04,
        "tasks": 64,
        "failed": 0,
    }


def event(step: int, kind: str) -> dict[str, Any]:
    """A record of events.jsonl."""
    text = f"{kind} at step {step}: {HOSTILE}"
    return {"server": HOSTILE, "time_s": float(step), "at": STARTED_S + step, "step": step, "kind": kind, "text": text}


def servers_record(step: int, servers: int) -> dict[str, Any]:
    """The content of servers.json; the last server's name is hostile and its speed far from that of the others."""
    return {
        "time_s": float(step),
        "step": step,
        "version": step // 2,
        "servers": [_server(i, step, servers) for i in range(servers)],
    }


def _server(number: int, step: int, servers: int) -> dict[str, Any]:
    is_last = number == servers - 1
    return {
        "server": HOSTILE if is_last else f"rollout-{number:04}",
        "version": step // 2 - (number % 7 == 0), "lag": int(number % 7 == 0),
        "tokens_per_s": 20.0 if is_last else 900.0 + number % 11, "idle_fraction": 0.1,
        "kv_cache_use": 0.4 + number % 10 / 50,
        "running": 24 + number % 3, "waiting": number % 2, "groups_limit": 64,
        "engine_deaths": 0, "requests_restarted": 0, "stall_s": 0.02,
    }  # fmt: skip


def trajectory(prompt: str, turns: Mapping[str, str], *, reward: float, version: int) -> m.Trajectory:
    """A trajectory in the tokens of the tiny text model: a prompt, then answers, each with what the env observes."""
    text, mask = prompt, [0] * len(prompt)
    for answer, observation in turns.items():
        text += answer + observation
        mask += [1] * len(answer) + [0] * len(observation)
    ids = [TEXT.tokens.index(letter) for letter in text]
    logprobs = -np.abs(np.sin(np.arange(len(text)))) * np.array(mask)
    ends = {version: (len(prompt) + len(text)) // 2, version + 1: len(text)}
    return _trajectory(ids, mask, logprobs, ends, reward, {HOSTILE: reward})


def _trajectory(
    ids: list[int],
    mask: list[int],
    logprobs: NDArray[np.float64],
    ends: Mapping[int, int],
    reward: float,
    scores: dict[str, float],
) -> m.Trajectory:
    """A trajectory whose tokens from the first action on are of versions that end before the given tokens."""
    starts = [mask.index(1), *ends.values()]
    return m.Trajectory(
        token_ids=np.array(ids, dtype=m.TOKEN_DTYPE).tobytes(),
        action_mask=np.array(mask, dtype=m.MASK_DTYPE).tobytes(),
        behaviour_logprobs=logprobs.astype(m.LOGPROB_DTYPE).tobytes(),
        spans=[
            m.VersionSpan(version=version, start=start, end=end)
            for start, (version, end) in zip(starts, ends.items(), strict=False)
        ],
        reward=reward,
        scores=scores,
        finish_reason="length",
    )


def _write_samples(config: RunConfig, steps: int) -> None:
    store = SampleStore(config.paths.samples, env=HOSTILE)
    for step in range(1, steps + 1, max(1, steps // SAMPLED_STEPS)):
        turns = {
            f"I call the tool at step {step}: {HOSTILE} ": f"<tool>{HOSTILE}</tool>\n",
            f"so it is {step}. {HOSTILE}": "",
        }
        kept = [
            trajectory(f"What is {HOSTILE}?\n", turns, reward=step / steps, version=step // 2),
            trajectory("What is 2?\n", {f"It is {step}": ""}, reward=0.0, version=step // 2),
        ]
        sources = [Source(f"{step}", step % TASKS), Source(f"{step + 1}", step % TASKS)]
        store.keep("step", step, kept, sources, actions={index: _actions(one) for index, one in enumerate(kept)})
        store.keep("eval", step // 2, kept, sources)


def _actions(one: m.Trajectory) -> ActionColumns:
    actions = int(np.frombuffer(one.action_mask, dtype=m.MASK_DTYPE).sum())
    wave = np.sin(np.arange(actions)).astype("<f4")
    return ActionColumns(
        ratio=np.exp(wave).tobytes(),
        advantage=wave.tobytes(),
        trained=(wave > -0.8).astype("<f4").tobytes(),
        entropy=np.abs(wave).tobytes(),
    )
