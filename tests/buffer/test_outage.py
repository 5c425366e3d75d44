"""What is said of an outage; tests/buffer/test_connect.py and tests/faults have real ones."""

import redis
import structlog

from slipstream.buffer.store.redis import Outage
from slipstream.configs import RunConfig


def test_each_outage_is_told_and_has_lasted_for_as_long_as_redis_gave_no_answer(config: RunConfig) -> None:
    outage = Outage(config.redis)
    with structlog.testing.capture_logs() as said:
        for error in (redis.exceptions.TimeoutError("no answer"), redis.exceptions.ConnectionError("refused")):
            outage.failed(error)
            outage.recovered()
    unanswered, refused = [line["for_s"] for line in said if line["event"] == "waiting for Redis"]
    assert unanswered >= config.redis.deadline_s > refused
