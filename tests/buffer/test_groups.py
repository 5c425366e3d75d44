"""What a learner reads of the groups that it has leased."""

import pytest
import redis

from slipstream.buffer.groups import GroupReader
from slipstream.buffer.keys import group_key
from slipstream.buffer.wire.codec import encode
from slipstream.configs import RunConfig
from slipstream.configs.errors import SlipstreamError
from tests.buffer.groups import train_group


def test_groups_are_read_in_the_order_of_their_ids(config: RunConfig, redis_url: str) -> None:
    groups = [train_group("1"), train_group("2", versions=(3, 4))]
    with redis.Redis.from_url(redis_url) as server:
        for group in groups:
            server.set(group_key(config.run.name, group.id), encode(group))
    assert GroupReader(config).read(["2", "1", "2"]) == [groups[1], groups[0], groups[1]]
    assert GroupReader(config).read([]) == []


def test_groups_that_are_not_stored_are_named(config: RunConfig, redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as server:
        server.set(group_key(config.run.name, "2"), encode(train_group("2")))
    with pytest.raises(SlipstreamError, match="groups 1, 3 are leased but not stored"):
        GroupReader(config).read(["1", "2", "3"])
