"""Engine arguments and environment of vLLM."""

import importlib.machinery
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.rollout_servers.engines.base import EngineSettings
from slipstream.rollout_servers.engines.vllm import plugin
from slipstream.rollout_servers.engines.vllm.arguments import engine_arguments, prepare_environment, uses_nccl


def settings(
    options: dict[str, object],
    *,
    stale: bool = False,
    context: int = 4096,
    rank: int | None = None,
    model: Path = Path("/a/model"),
) -> EngineSettings:
    config = RunConfig.model_validate(
        {
            "model": {"build": "digits", "lora": None if rank is None else {"rank": rank}},
            "rollout": {"engine": {"options": options, "max_model_len": context}, "sampling": {"max_tokens": 8}},
            "weights": {"keep_stale_kv": stale},
        }
    )
    return EngineSettings(config, model, eos_token_ids=())


@pytest.mark.parametrize(
    ("gpu", "before", "method"),
    [(True, {}, "spawn"), (False, {}, None), (True, {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}, "fork")],
    ids=["gpu", "cpu", "set-by-user"],
)
def test_workers_are_spawned_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, before: dict[str, str], method: str | None
) -> None:
    environment = dict(before)
    monkeypatch.setattr("os.environ", environment)
    prepare_environment(gpu=gpu)
    assert environment.get("VLLM_WORKER_MULTIPROC_METHOD") == method


@pytest.mark.parametrize(("stale", "arguments"), [(True, {"enable_prefix_caching": False}), (False, {})])
def test_stale_cache_disables_prefix_caching(stale: bool, arguments: dict[str, bool]) -> None:
    found = engine_arguments(settings({}, stale=stale), gpu=True)
    assert {name: value for name, value in found.items() if "prefix" in name} == arguments


@pytest.mark.parametrize(
    ("context", "options", "enabled"), [(128, {}, False), (129, {}, None), (128, {"enable_prefix_caching": True}, True)]
)
def test_context_within_a_block_disables_prefix_caching(
    context: int, options: dict[str, object], enabled: bool | None
) -> None:
    found = engine_arguments(settings(options, context=context), gpu=False)
    assert found.get("enable_prefix_caching") is enabled


@pytest.mark.parametrize(
    ("gpu", "rank", "options", "backend"),
    [
        (False, 512, {}, "CPU_MLA"),
        (False, 512, {"attention_backend": "AMX_MLA"}, "AMX_MLA"),
        (False, None, {}, None),
        (True, 512, {}, None),
    ],
)
def test_latent_attention_has_the_same_kernel_on_each_cpu(
    tmp_path: Path, gpu: bool, rank: int | None, options: dict[str, object], backend: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"kv_lora_rank": rank}))
    found = engine_arguments(settings(options, model=tmp_path), gpu=gpu)
    assert found.get("attention_backend") == backend


@pytest.mark.parametrize(("rank", "most"), [(1, 1), (4, 8), (16, 16), (33, 64), (512, 512)])
def test_adapter_has_a_rank_that_vllm_takes(rank: int, most: int) -> None:
    found = engine_arguments(settings({}, rank=rank), gpu=False)
    assert (found["enable_lora"], found["max_loras"], found["max_lora_rank"]) == (True, 1, most)
    assert "enable_lora" not in engine_arguments(settings({}), gpu=False)


def test_adapters_go_by_host_memory() -> None:
    assert uses_nccl(settings({}), gpu=True)
    assert not uses_nccl(settings({}, rank=4), gpu=True)


@pytest.mark.parametrize(
    ("stale", "option", "value"),
    [
        (False, "logprobs_mode", "raw_logprobs"), (False, "seed", 7), (False, "skip_tokenizer_init", False),
        (True, "enable_prefix_caching", True),
    ],
)  # fmt: skip
def test_options_that_falsify_answers_are_refused(stale: bool, option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"options\.{option}={value}: .* {option}="):
        engine_arguments(settings({option: value}, stale=stale), gpu=True)


def test_other_options_reach_vllm_unchanged() -> None:
    options = {"enable_prefix_caching": True, "logprobs_mode": "processed_logprobs", "max_num_seqs": 3, "block_size": 8}
    assert engine_arguments(settings(options), gpu=True).items() >= options.items()


# --- vLLM's plug-in, which stands in for torchvision ------------------------------------------------------------------


ROOT = Path(__file__).parents[4]


@pytest.fixture
def finders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if not isinstance(each, plugin._Finder)])


def test_vllm_finds_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"]["slipstream"] == f"{plugin.__name__}:register"


@pytest.mark.usefixtures("finders")
@pytest.mark.parametrize("installed", [False, True])
def test_nothing_is_replaced_where_torchvision_is(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.machinery.ModuleSpec("torchvision", None) if installed else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    before = list(sys.meta_path)
    for _ in range(2):  # vLLM may load a plug-in more than once
        plugin.register()
    assert len(sys.meta_path) == len(before) + (not installed)


# --- processes of vLLM, for which a stub stands, after their server was killed ----------------------------------------


DEADLINE_S = 60.0
FAMILY = """
import time
from multiprocessing import get_context
from slipstream.rollout_servers.engines.vllm.arguments import claim_children

def core(below):
    if below:
        start(below - 1)
    else:
        import slipstream.rollout_servers.engines.vllm.worker  # calls `end_with_server`
        print("started", flush=True)
    time.sleep(600)

def start(below):
    get_context("spawn").Process(target=core, args=(below,)).start()

if __name__ == "__main__":
    claim_children()
    start(1)
    time.sleep(600)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[psutil.Popen]:
    script = tmp_path / "family.py"
    script.write_text(FAMILY)
    with psutil.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as process:
        yield process


def test_core_and_worker_end_with_their_server(server: psutil.Popen) -> None:
    assert server.stdout.readline() == b"started\n"
    below = server.children(recursive=True)
    server.kill()
    _, alive = psutil.wait_procs(below, timeout=DEADLINE_S)
    for process in alive:
        process.kill()
    assert not alive
