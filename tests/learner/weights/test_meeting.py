"""Whoever breaks off a transfer group is heard from the moment on at which it is begun."""

import pytest

from slipstream.configs.schema.weights import WeightsConfig
from slipstream.learner.weights.transports.base import TransferError
from slipstream.learner.weights.transports.meeting import Meeting
from tests.conftest import free_port


def test_a_group_that_is_broken_off_before_its_members_are_waited_for_is_not_waited_for() -> None:
    meeting = Meeting(WeightsConfig(store_port=free_port(), deadline_s=60.0))
    try:
        meeting.begin()
        meeting.abort()
        with pytest.raises(TransferError, match="was broken off"):
            meeting.gather(1, 2)
        meeting.begin()
        meeting.gather(2, 1)
    finally:
        meeting.close()
