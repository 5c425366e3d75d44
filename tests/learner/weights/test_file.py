"""Files of versions that nobody needs any more."""

from pathlib import Path

import pytest
import torch

from slipstream.buffer.wire.weights import Manifest, TensorInfo
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports.file import FileTransport


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
