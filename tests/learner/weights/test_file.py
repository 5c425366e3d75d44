"""Files of versions that nobody needs any more, and a folder that is not there."""

import shutil
import time
from pathlib import Path

import pytest
import torch

from slipstream.buffer.wire.weights.protocol import Manifest, TensorInfo
from slipstream.configs import RunConfig
from slipstream.learner.weights.fetch import FileTransport
from slipstream.learner.weights.snapshot import Snapshot
from tests.learner.weights.learner import Join, Learner, gathered, same, wait_until


def version(number: int) -> Snapshot:
    tensors = [TensorInfo(name="weight", dtype="float32", shape=[4])]
    manifest = Manifest(version=number, tensors=tensors, bucket_bytes=16, evaluate=False)
    return Snapshot(manifest, torch.zeros(16, dtype=torch.uint8)).sealed()


def test_an_old_file_that_can_not_be_deleted_is_deleted_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink, stale = Path.unlink, tmp_path / "v00000001.safetensors"

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == stale:
            raise OSError(116, "Stale file handle")
        unlink(path, missing_ok=missing_ok)

    transport = FileTransport(tmp_path, full_every=1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        for number in range(1, 6):
            transport.prepare(version(number))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {stale.name, "v00000004.safetensors", "v00000005.safetensors"}
    transport.prepare(version(6))
    assert not stale.exists()


@pytest.fixture
def transport() -> str:
    return "file"


@pytest.mark.parametrize("deadline_s", [2.0])
def test_unwritable_folder_evicts_for_one_deadline_each_time(
    config: RunConfig, learner: Learner, join: Join, deadline_s: float
) -> None:
    member = join("server-1")
    folder = config.paths.weights
    aside = folder.with_name("aside")
    gathered(learner, "server-1")
    learner.publish(1)
    member.wait_for(1)
    folder.rename(aside)
    folder.touch()
    learner.publish(2)
    wait_until(lambda: len(member.evictions) == 3)
    assert "can't be sent through file" in member.evictions[0]
    record = learner.publisher._roster._records["server-1"]
    assert record.away_until - time.monotonic() <= deadline_s
    folder.unlink()
    aside.rename(folder)
    assert same(member.wait_for(2), learner.sent[2])


@pytest.mark.parametrize("lost", ["folder", "file"])
def test_a_chain_of_which_something_was_deleted_is_begun_anew(
    config: RunConfig, learner: Learner, join: Join, lost: str
) -> None:
    first = join("server-1")
    folder = config.paths.weights
    gathered(learner, "server-1")
    for number in (1, 2):
        learner.publish(number)
        first.wait_for(number)
    if lost == "folder":
        shutil.rmtree(folder)
    else:
        (folder / "v00000001.safetensors").unlink()
    learner.deliver(3, first)
    assert same(join("server-2").wait_for(3), learner.sent[3])
    assert first.evictions == []
