"""What a rollout server pulls from the learner's stream."""

import pytest
import torch

from slipstream.buffer.wire.weights import Announce, Manifest, Source, TensorInfo
from slipstream.configs import RunConfig
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.rollout_servers.weights.staging import Staging
from slipstream.rollout_servers.weights.transports.stream import StreamReceiver


def test_for_a_version_that_is_held_no_connection_is_made(run_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.rollout_servers.weights.transports.stream.connect_dealer", pytest.fail)
    tensors = [TensorInfo(name="weight", dtype="float32", shape=[4])]
    manifest = Manifest(version=1, tensors=tensors, bucket_bytes=16, evaluate=False)
    manifest = Snapshot(manifest, torch.zeros(16, dtype=torch.uint8)).sealed().manifest
    staging = Staging(run_name, shared=False)
    staging.begin(manifest).zero_()
    staging.finish(manifest)
    source = Source(place="tcp://127.0.0.1:1", parts=[])
    announce = Announce(transfer=1, transport="stream", manifest=manifest, deadline_s=1.0, source=source)
    config = RunConfig.model_validate({"run": {"name": run_name}, "model": {"build": "digits"}})
    StreamReceiver(config).receive(announce, staging)
    assert staging.version == 1
