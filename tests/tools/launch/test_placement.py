"""Placement: who gets which cores and GPUs, and what is refused."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.tools.fit import FitReport
from slipstream.tools.launch.machine import Gpu, Machine
from slipstream.tools.launch.placement import Placement, divide_memory, place
from tests.tools.run_command import demo_config

TP2 = "rollout.engine.options={tensor_parallel_size: 2}"


def machine(gpus: int = 0, cores: int = 2) -> Machine:
    """A machine with equal GPUs."""
    return Machine(tuple(range(cores)), tuple(Gpu(str(number), "H100", 80 << 30) for number in range(gpus)))


def placed(gpus: int, *overrides: str, cores: int = 2, earlier: Mapping[str, Any] | None = None) -> Placement:
    """The demo on such a machine."""
    return place(machine(gpus, cores), demo_config(Path("folder"), *overrides), earlier)


def gpus_of(placement: Placement) -> dict[str, tuple[int, ...]]:
    """GPUs by process."""
    return {share.name: share.gpus for share in placement.shares if share.gpus}


# --- number of processes and GPUs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ([], ["redis", "buffer", "rollout", "learner"]),
        (["redis.url=redis://elsewhere"], ["buffer", "rollout", "learner"]),
        (["rollout.servers=2", "learner.ranks=2"], ["redis", "buffer", "rollout", "rollout-1", "learner", "learner-1"]),
        (["learner.parallel={dp_shard: 2}"], ["redis", "buffer", "rollout", "learner", "learner-1"]),
        (["learner.parallel={ep: 2, tp: 2}"], ["redis", "buffer", "rollout", "learner", "learner-1"]),
    ],
    ids=["one each", "external Redis", "given", "mesh", "expert ranks"],
)
def test_processes_without_gpus(overrides: list[str], names: list[str]) -> None:
    placement = placed(0, *overrides)
    assert [share.name for share in placement.shares] == names
    assert gpus_of(placement) == {}


@pytest.mark.parametrize(
    ("gpus", "overrides", "rollout", "learner"),
    [
        (2, [], 1, 1),
        (8, [], 4, 4),
        (8, [TP2], 2, 4),
        (3, [], 1, 2),
        (8, ["rollout.servers=6"], 6, 2),
        (8, ["learner.ranks=2"], 6, 2),
        (8, ["learner.ranks=2", TP2], 3, 2),
        (8, ["gpus={rollout: '0-5', learner: '6,7'}"], 6, 2),
        (8, ["gpus={learner: 7}"], 7, 1),
        (8, ["gpus={learner: 7}", "rollout.servers=2"], 2, 1),
        (8, ["gpus={learner: 7}", TP2], 3, 1),
        (8, ["gpus={rollout: '2-3'}", TP2, "learner.ranks=4"], 1, 4),
        (8, ["learner.parallel={dp_replicate: 2, dp_shard: 2}"], 4, 4),
        (8, ["learner.parallel={dp_shard: 2}"], 6, 2),
        (7, ["learner.groups_per_step=9"], 4, 3),
    ],
)
def test_division_of_gpus(gpus: int, overrides: list[str], rollout: int, learner: int) -> None:
    placement = placed(gpus, *overrides)
    servers, ranks = placement.of("rollout"), placement.of("learner")
    assert (len(servers), len(ranks)) == (rollout, learner)
    assert {len(rank.gpus) for rank in ranks} == {1}
    assert {len(server.gpus) for server in servers} == {2 if TP2 in overrides else 1}
    used = [*placement.gpus("rollout"), *placement.gpus("learner")]
    assert len(set(used)) == len(used)


def test_gpus_are_those_that_are_named() -> None:
    placement = placed(8, "gpus={rollout: '1,3,5-6', learner: '0,7'}", TP2)
    assert gpus_of(placement) == {"rollout": (1, 3), "rollout-1": (5, 6), "learner": (0,), "learner-1": (7,)}


@pytest.mark.parametrize(
    ("generator_idle", "learner_idle", "rollout"), [(0.0, 0.75, 6), (0.75, 0.0, 2), (0.2, 0.2, 4), (0.99, 0.0, 1)]
)
def test_idle_shares_of_an_earlier_run_divide_gpus(generator_idle: float, learner_idle: float, rollout: int) -> None:
    earlier = {
        "placement": placed(8).as_record(),
        "generator_idle_fraction": generator_idle,
        "learner_idle_fraction": learner_idle,
    }
    free = "learner.groups_per_step=840"  # any number of ranks up to 8 has equally many groups
    assert len(placed(8, free, earlier=earlier).of("rollout")) == rollout


@pytest.mark.parametrize(
    "earlier", [{}, {"generator_idle_fraction": 0.0, "learner_idle_fraction": 0.9, "placement": placed(0).as_record()}]
)
def test_earlier_run_without_gpus_divides_nothing(earlier: Mapping[str, Any]) -> None:
    assert len(placed(8, earlier=earlier).of("rollout")) == 4


def test_single_gpu_is_shared() -> None:
    assert gpus_of(placed(1)) == {"rollout": (0,), "learner": (0,)}


# --- cores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "threads", "bound"), [(2, 1, []), (4, 2, [(0, 1), (2, 3)]), (9, 4, [(0, 1, 2, 3), (4, 5, 6, 7)])]
)
def test_cores_are_divided(cores: int, threads: int, bound: list[tuple[int, ...]]) -> None:
    placement = placed(0, cores=cores)
    heavy = [*placement.of("rollout"), *placement.of("learner")]
    assert [share.threads for share in heavy] == [threads, threads]
    assert [share.cores for share in heavy if share.cores] == bound
    assert {(share.threads, share.cores) for share in (*placement.of("redis"), *placement.of("buffer"))} == {(1, ())}


def test_users_threads_win_and_not_every_platform_binds() -> None:
    free = replace(machine(cores=8), threads=3, pins=False)
    placement = place(free, demo_config(Path("folder")))
    assert {(share.threads, share.cores) for share in placement.of("learner")} == {(3, ())}


# --- environment and record -------------------------------------------------------------------------------------------


def test_processes_see_their_gpus_alone() -> None:
    placement = placed(4, TP2, "rollout.servers=1", "learner.ranks=2")
    (server,), (root, other) = placement.of("rollout"), placement.of("learner")
    assert placement.environment(server)["CUDA_VISIBLE_DEVICES"] == "0,1"
    for rank, share in enumerate((root, other)):
        variables = placement.environment(share, rendezvous_port=7)
        assert variables["CUDA_VISIBLE_DEVICES"] == "2,3"
        assert (variables["RANK"], variables["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (variables["WORLD_SIZE"], variables["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("127.0.0.1", "7")
    (buffer,) = placement.of("buffer")
    assert placement.environment(buffer) == {"OMP_NUM_THREADS": "1"}


def test_record_and_table_have_every_process() -> None:
    placement = placed(2, cores=8)
    record = json.loads(json.dumps(placement.as_record()))
    assert record["cores"] == 8
    assert record["gpus"] == [{"name": "H100", "memory_bytes": 80 << 30}] * 2
    assert record["processes"]["learner"] == {"threads": 4, "cores": [4, 5, 6, 7], "gpus": [1]}
    rows = {line.split()[0]: line.split()[1:] for line in placement.text.splitlines()}
    assert rows["learner"] == ["4-7", "4", "1"]
    assert record["processes"].keys() <= rows.keys()


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "overrides", "named"),
    [
        (0, ["gpus={rollout: '0'}"], ["gpus.rollout=0", "0 GPUs"]),
        (2, ["gpus={rollout: '0-3', learner: '1'}"], ["gpus.rollout=0-3", "2 GPUs", "GPU 2-3"]),
        (2, ["rollout.servers=2"], ["rollout.servers=2", "2 + 1", "2 GPUs"]),
        (4, ["learner.ranks=4"], ["learner.ranks=4", "1 + 4", "4 GPUs"]),
        (2, [TP2], ["2 GPUs each", "2 + 1"]),
        (1, [TP2], ["2 + 1", "1 GPU"]),
        (4, ["rollout.engine.options={tensor_parallel_size: 0}"], ["tensor_parallel_size=0"]),
        (4, ["rollout.engine.options={tp_size: two}"], ["tp_size='two'"]),
        (8, ["learner.parallel={cp: 8}"], ["1 + 8", "8 GPUs"]),
        (8, ["gpus={rollout: '0-2'}", TP2], ["rollout.servers=auto", "3 GPUs", "2 of each"]),
        (8, ["gpus={rollout: '0-5'}", "rollout.servers=4"], ["rollout.servers=4", "6 GPUs", "4 times"]),
        (8, ["gpus={learner: 7}", "rollout.servers=9"], ["rollout.servers=9", "7 GPUs", "9 times"]),
        (8, ["gpus={rollout: '0-7'}"], ["gpus.learner", "none is left"]),
        (8, ["gpus={learner: '0-7'}"], ["gpus.rollout", "none is left"]),
        (8, ["gpus={learner: '6,7'}", "learner.ranks=4"], ["learner.ranks=4", "2 GPUs", "6-7"]),
        (0, ["learner.ranks=3"], ["learner.ranks=3", "32"]),
        (0, ["learner.ranks=3", "learner.parallel={tp: 2}"], ["learner.ranks=3", "tp=2", "multiple of 2"]),
        (0, ["learner.ranks=4", "learner.parallel={dp_shard: 2}"], ["learner.ranks=4", "dp_shard=2"]),
        (0, ["learner.parallel={dp_shard: 64}"], ["learner.ranks=64", "64 of them", "32"]),
        (1, ["weights.transport=nccl"], ["GPU 0", "NCCL", "weights.transport=auto"]),
        (2, ["gpus={rollout: '0', learner: '0,1'}", "weights.transport=nccl"], ["GPU 0", "NCCL"]),
    ],
)
def test_what_cannot_work_is_refused_with_the_numbers(gpus: int, overrides: list[str], named: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        placed(gpus, *overrides)
    (problem,) = refused.value.problems
    assert [part for part in named if part not in problem] == []


@pytest.mark.parametrize("value", ["", "a", "0-", "3-1", "0,0", "0-3,2", "-1"])
def test_wrong_list_of_gpus_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"gpus\.rollout"):
        demo_config(Path("folder"), f"gpus={{rollout: '{value}'}}")


def test_gpus_may_be_auto_and_survive_in_the_written_configuration() -> None:
    config = demo_config(Path("folder"), "gpus=auto")
    assert config == demo_config(Path("folder"))
    named = demo_config(Path("folder"), "gpus={learner: 7, rollout: '0-3'}")
    assert RunConfig.model_validate(named.model_dump(mode="json")) == named


REPORT = FitReport(
    parameters=8_000_000_000,
    gpu_memory=80e9,
    mesh={},
    tokens=16384,
    learner={"weights": 20e9, "gradients": 10e9},
    host={},
    engine={"weights": 16e9, "KV cache": 20e9, "CUDA, work": 2e9, "KV cache per 1,000 tokens": 1e9},
    version_bytes=4e9,
    sequences=8,
    remedies=[],
    proposed=None,
    engine_remedy=None,
)
SIZES = ("rollout.engine.max_model_len=1000", "rollout.engine.max_sequences=10", "rollout.engine.kv_cache_bytes=null")


def divided(gpus: int, *overrides: str, **changes: Any) -> Placement:
    """The placement with the division of shared memory, by what `REPORT` says with some changes."""
    config = demo_config(Path("folder"), *SIZES, *overrides)
    return divide_memory(place(machine(gpus), config), config, replace(REPORT, **changes))


@pytest.mark.parametrize(
    ("overrides", "changes", "transport", "option", "cache"),
    [
        # All that is of use: 10 sequences of 1,000 tokens.
        (["rollout.engine.name=hf"], {}, "ipc", {"gpu_memory_utilization": 0.438}, 10e9),
        ([], {}, "shm", {"gpu_memory_utilization": 0.35}, 10e9),
        (["rollout.engine.name=sglang"], {}, "shm", {"mem_fraction_static": 0.929}, 10e9),
        (["rollout.engine.name=hf", "weights.transport=shm"], {}, "shm", {"gpu_memory_utilization": 0.438}, 10e9),
        (["rollout.engine.name=hf", "weights.transport=file"], {}, "file", {"gpu_memory_utilization": 0.438}, 10e9),
        # What 95% of the memory, the learner and two versions leave.
        (["rollout.engine.name=hf"], {"learner": {"weights": 40e9}}, "ipc", {"gpu_memory_utilization": 0.35}, 6e9),
        (["rollout.engine.kv_cache_bytes=3000000000"], {}, "shm", {"gpu_memory_utilization": 0.263}, 3e9),
        (["rollout.engine.options.gpu_memory_utilization=0.25"], {}, "shm", {"gpu_memory_utilization": 0.25}, 2e9),
    ],
)
def test_engine_gets_its_share_of_a_gpu(
    overrides: list[str], changes: dict[str, Any], transport: str, option: dict[str, float], cache: float
) -> None:
    placement = divided(1, *overrides, **changes)
    sharing = placement.sharing
    assert sharing is not None
    ((key, value),) = option.items()
    assert sharing.settings == {
        "weights.transport": transport,
        f"rollout.engine.options.{key}": value,
        "rollout.engine.kv_cache_bytes": cache,
    }
    assert sharing.learner + sharing.engine <= 0.95 * 80e9
    assert placement.as_record()["shared_memory"]["bytes"]["kv_cache"] == cache
    config = demo_config(Path("folder"), *overrides, *(f"{name}={set_to}" for name, set_to in sharing.settings.items()))
    assert config.rollout.engine.options[key] == value


def test_engines_on_other_gpus_too_get_weights_by_shared_memory() -> None:
    placement = divided(2, "rollout.engine.name=hf", "gpus={rollout: '0,1', learner: '1'}")
    assert placement.sharing is not None and placement.sharing.transport == "shm"
    assert divided(2).sharing is None


@pytest.mark.parametrize(
    ("gpus", "overrides", "changes", "named"),
    [
        (4, [], {"learner": {"weights": 90e9}, "remedies": ["learner.offload=true"]}, ["90.0", "learner.offload"]),
        (4, [], {"sequences": 0, "engine_remedy": "tensor_parallel_size=2"}, ["80 GB", "tensor_parallel_size=2"]),
        (1, [], {"learner": {"weights": 60e9}}, ["80.0 GB", "64.0 GB", "19.0 GB", "KV cache 1.0", "1000 tokens"]),
        (1, ["rollout.engine.kv_cache_bytes=40000000000"], {}, ["58.0 GB", "40,000,000,000 bytes"]),
        (1, ["rollout.engine.options.gpu_memory_utilization=0.6"], {}, ["gpu_memory_utilization=0.6"]),
        (1, ["rollout.engine.options.gpu_memory_utilization=0.2"], {}, ["gpu_memory_utilization=0.2"]),
    ],
)
def test_memory_that_does_not_suffice_is_refused_with_the_numbers(
    gpus: int, overrides: list[str], changes: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        divided(gpus, *overrides, **changes)
    (problem,) = refused.value.problems
    assert [part for part in named if part not in problem] == []


def test_hf_needs_no_room_for_a_sequence_on_gpus_of_its_own() -> None:
    assert divided(4, "rollout.engine.name=hf", sequences=0).sharing is None


@pytest.mark.parametrize(("chosen", "gpus", "expands"), [(False, 1, True), (True, 1, False), (False, 2, False)])
def test_learner_on_a_shared_gpu_gets_expandable_segments(chosen: bool, gpus: int, expands: bool) -> None:
    placement = place(replace(machine(gpus), sets_allocator=chosen), demo_config(Path("folder")))
    ((learner,), (server,)) = placement.of("learner"), placement.of("rollout")
    assert ("PYTORCH_CUDA_ALLOC_CONF" in placement.environment(learner)) == expands
    assert "PYTORCH_CUDA_ALLOC_CONF" not in placement.environment(server)
