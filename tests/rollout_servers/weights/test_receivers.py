"""What all receivers have in common."""

import pytest

from slipstream.buffer.wire.weights import Form
from slipstream.configs import RunConfig
from slipstream.rollout_servers.weights.staging import TransferFailed
from slipstream.rollout_servers.weights.transports.build import build_receivers


@pytest.mark.parametrize("transport", ["shm", "file", "stream"])
def test_a_transport_that_does_not_broadcast_enters_no_transfer_group(transport: str) -> None:
    receiver = build_receivers(RunConfig.model_validate({"model": {"build": "digits"}}))[transport]
    form = Form(transfer=1, epoch=1, transport=transport, host="127.0.0.1", port=1, rank=1, world=2, deadline_s=1.0)
    with pytest.raises(TransferFailed, match=f"transport {transport} has no transfer groups"):
        receiver.enter(form)
    receiver.close()
