"""What all receivers have in common."""

from pathlib import Path

import pytest

from slipstream.buffer.wire.weights.fabric import TransferError
from slipstream.buffer.wire.weights.protocol import Announce, Form, Manifest, Part, Source
from slipstream.configs.schema.weights import SecurityConfig
from slipstream.rollout_servers.engines.staging import SourceGone, Staging
from slipstream.rollout_servers.weights.receivers import build_receivers


def test_deleted_file_raises_source_gone(run_name: str, tmp_path: Path) -> None:
    receiver = build_receivers(SecurityConfig())["file"]
    manifest = Manifest(version=1, tensors=[], bucket_bytes=1 << 16, evaluate=False)
    source = Source(place=str(tmp_path), parts=[Part(name="1", version=1, size_bytes=0)])
    announce = Announce(transfer=1, transport="file", manifest=manifest, deadline_s=1.0, source=source)
    with pytest.raises(SourceGone, match=f"there is no {tmp_path}/1"):
        receiver.receive(announce, Staging(run_name, shared=False))


@pytest.mark.parametrize("transport", ["shm", "file", "stream"])
def test_fetched_transport_refuses_transfer_group(transport: str) -> None:
    receiver = build_receivers(SecurityConfig())[transport]
    form = Form(transfer=1, epoch=1, transport=transport, host="127.0.0.1", port=1, rank=1, world=2, deadline_s=1.0)
    with pytest.raises(TransferError, match=f"transport {transport} has no transfer groups"):
        receiver.enter(form)
    receiver.close()
