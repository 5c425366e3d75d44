"""Trackers' own packages: what they keep of a run that is stopped and continued, without a network."""

import json
import os
import shutil
import struct
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs import RunConfig
from slipstream.configs.runtime.passwords import REDIS_PASSWORD_VARIABLE

# `make trackers-check` sets up an environment with all packages.
PYTHON = os.environ.get("SLIPSTREAM_TRACKERS_PYTHON")
EVERYWHERE = PYTHON or (sys.executable if find_spec("swanlab") else None)
pytestmark = pytest.mark.timeout(300)

# One part of the run, in a process of its own: some packages change the process that they are in.
LOG = """
import sys
from slipstream.configs import RunConfig
from slipstream.learner.metrics.trackers import build_trackers
config, first = RunConfig.model_validate_json(sys.argv[1]), int(sys.argv[2])
recorded = config.model_dump(mode="json")
trackers = build_trackers(config.paths, config.tracking, run="tracked", recorded=recorded)
for tracker in trackers:
    for step in (first, first + 1):
        metrics = {"reward": 0.25 * step, "buffer/ready": 12, "note": "text"}
        tracker.log({"kind": "step", "step": step, "steps": 9, **metrics})
        row = {"number": float(step), "chosen": "best", "prompt": "1|2", "answer": f"<b>{step}</b>"}
        tracker.add_rows("samples/step", lambda row=row: [row])
    tracker.log({"kind": "eval", "step": first, "policy_version": 3, "score": 0.625})
    tracker.log({"kind": "finish", "reward": 0.875})
    tracker.close()
    assert not getattr(tracker, "lost", 0)
"""
REWARDS = [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
ANSWERS = [f"<b>{step}</b>" for step in (1, 2, 3, 4)]


def run_folder(python: str | None, folder: Path, **tracking: Any) -> Path:
    """The folder of a run of four steps, stopped and continued after the second."""
    if python is None:
        pytest.skip("needs the packages of the trackers: make trackers-check")
    config = RunConfig.model_validate(
        {"run": {"name": "tracked", "dir": str(folder)}, "model": {"build": "digits"}, "tracking": tracking}
    )
    for first in (1, 3):
        command = [python, "-c", LOG, config.model_dump_json(), str(first)]
        # Nothing but loopback, and not even that is up, where the machine lets us make such a network.
        alone = ["unshare", "--user", "--map-root-user", "--net"]
        if shutil.which("unshare") and subprocess.run([*alone, "true"], check=False).returncode == 0:
            command = [*alone, *command]
        environment = {**os.environ, REDIS_PASSWORD_VARIABLE: "secret", "TRACKIO_DIR": str(folder / "trackio")}
        subprocess.run(command, cwd=folder, env=environment, check=True, timeout=200)
    return config.paths.root


def output(code: str, *arguments: object) -> Any:
    """The JSON that a program in the environment of the packages prints."""
    assert PYTHON is not None
    done = subprocess.run([PYTHON, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("mode", ["local", "offline"])
def test_swanlab(tmp_path: Path, mode: str) -> None:
    folder = run_folder(EVERYWHERE, tmp_path, swanlab={"mode": mode})
    reader = "import sys\nfrom swanlab.sdk.internal.core_python.store import DataStoreReader as R\n"
    reader += "r = R(); r.open(sys.argv[1]); sys.stdout.buffer.write(b''.join(r))"
    logged = b""
    for path in (folder / "swanlab").glob("run-*/*.swanlab"):
        assert EVERYWHERE is not None
        logged += subprocess.run([EVERYWHERE, "-c", reader, path], capture_output=True, check=True).stdout
    files = b"".join(path.read_bytes() for path in (folder / "swanlab").rglob("*") if path.is_file())
    assert b"secret" not in logged + files
    for name, value in (("reward", 0.25), ("reward", 1.0), ("buffer/ready", 12.0), ("eval/score", 0.625)):
        assert name.encode() in logged
        assert struct.pack("<d", value) in logged
    assert struct.pack("<d", 0.875) not in logged
    assert all(answer.encode() in files for answer in ANSWERS)


def test_wandb(tmp_path: Path) -> None:
    folder = run_folder(PYTHON, tmp_path, wandb={"mode": "offline"}) / "wandb"
    parts = sorted(folder.glob("offline-run-*/*.wandb"))
    assert len(parts) == 2
    assert len({part.name for part in parts}) == 1, "one id"
    logged = b"".join(part.read_bytes() for part in parts)
    assert all(name in logged for name in (b"reward", b"buffer/ready", b"eval/score"))
    tables = [json.loads(file.read_text()) for file in folder.rglob("*.table.json")]
    assert {row[-1] for table in tables for row in table["data"]} == set(ANSWERS)
    assert b"secret" not in logged


def test_mlflow(tmp_path: Path) -> None:
    folder = run_folder(PYTHON, tmp_path, mlflow={}, names="verl")
    run = json.loads((folder / "trackers.json").read_text())["mlflow"]
    code = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
metrics = {n: [(m.step, m.value) for m in client.get_metric_history(sys.argv[2], n)] for n in sys.argv[3:]}
print(json.dumps([metrics, client.get_run(sys.argv[2]).info.status]))
"""
    names = ["critic/rewards/mean", "buffer/ready", "val-core/eval/reward/mean"]
    metrics, status = output(code, f"sqlite:///{folder}/mlflow.db", run, *names)
    assert [tuple(point) for point in metrics[names[0]]] == REWARDS
    assert [point[1] for point in metrics[names[2]]] == [0.625, 0.625]
    assert status == "FINISHED"
    table = json.loads((folder / "mlflow" / run / "artifacts" / "samples" / "step.json").read_text())
    assert [row[table["columns"].index("answer")] for row in table["data"]] == ANSWERS


def test_tensorboard(tmp_path: Path) -> None:
    folder = run_folder(PYTHON, tmp_path, tensorboard={}) / "tensorboard"
    code = """
import json, struct, sys
from tensorboardX.proto.event_pb2 import Event
found = []
for path in sys.argv[1:]:
    data = open(path, "rb").read()
    while data:  # records: length, its checksum, content, its checksum
        (size,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + size])
        for value in event.summary.value:
            strings = [string.decode() for string in value.tensor.string_val]
            found.append((value.tag, event.step, value.simple_value, strings))
        data = data[16 + size :]
print(json.dumps(found))
"""
    found = output(code, *sorted(folder.iterdir()))
    assert [(step, value) for tag, step, value, _ in found if tag == "reward"] == REWARDS
    texts = ["".join(strings) for tag, _, _, strings in found if tag.startswith("samples/step")]
    assert [answer for answer, text in zip(ANSWERS, texts, strict=True) if answer in text] == ANSWERS


def test_trackio(tmp_path: Path) -> None:
    run_folder(PYTHON, tmp_path, trackio={}, project="mine")
    code = """
import json, sqlite3, sys
rows = sqlite3.connect(sys.argv[1]).execute("select run_name, step, metrics from metrics order by id").fetchall()
print(json.dumps([(name, step, json.loads(metrics)) for name, step, metrics in rows]))
"""
    rows = output(code, tmp_path / "trackio" / "mine.db")
    assert len({name for name, _, _ in rows}) == 1
    assert [(step, metrics["reward"]) for _, step, metrics in rows if "reward" in metrics] == REWARDS
    tables = [metrics["samples/step"]["_value"] for _, _, metrics in rows if "samples/step" in metrics]
    assert [row["answer"] for table in tables for row in table] == ANSWERS
