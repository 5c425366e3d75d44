"""Combinations of keys that can't work, and the documentation of all keys."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from slipstream.configs.load import load_config
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.base import NamedSection, Section, sections_in
from slipstream.configs.schema.rollout import RolloutConfig
from tests.configs.conftest import DEMO, problems_of, require_problem


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["model.path=/models/x"], "model.path=/models/x model.build=digits model.build=null"),
        (["model.build=null"], "model.path model.build:"),
        (["model.lora={}", "weights.transport=nccl"], "model.lora weights.transport=nccl"),
        (["model.lora={}", "model.train_vision_encoder=true"], "model.lora model.train_vision_encoder"),
        (["rewards=[]"], "rewards"),
        (["tracking.trace=stdout"], "tracking.trace stdout"),
        (["tracking.trace='http://:4318'"], "tracking.trace http://:4318"),
        (["tracking.trace='http://host:port'"], "tracking.trace port"),
        (["tracking.prometheus=70000"], "tracking.prometheus 70000 65535"),
        (["tracking.prometheus=localhost"], "tracking.prometheus localhost HOST:PORT"),
        (["rewards=[{name: digit_match, weight: 0}, {name: exact_match, weight: 0}]"], "rewards: weight"),
        (["rewards=[{name: a}, {name: a}]"], "rewards a once"),
        (["learner.groups_per_step=5", "learner.updates_per_step=2"],
         "learner.groups_per_step=5 learner.updates_per_step=2"),
        (["rollout.group_size=1"], "rollout.group_size learner.advantage=grpo"),
        (["rollout.group_size=1", "learner.advantage=reinforce_plus_plus", "buffer.curriculum={}"],
         "buffer.curriculum rollout.group_size"),
        (["learner.streams={rl: 0}"], "learner.streams: 0"),
        (["learner.streams.ref_kl=1"], "learner.streams.ref_kl learner.kl"),
        *(
            (["env.name=mix", f"env.options={{envs: [{{name: digits, algorithm: {algorithm}}}]}}"], parts)
            for algorithm, parts in (
                ("{advantage: none}", "env.options.envs.0.algorithm.advantage 'none'"),
                ("{streams: {ce: -1}}", "env.options.envs.0.algorithm.streams.ce 0"),
                ("{loss: topr}", "env.options.envs, digits topr learner.correction.weight"),
                ("{advantage: gae}", "env.options.envs, digits gae learner.advantage"),
                ("{advantage: prime}", "env.options.envs, digits prime learner.advantage=grpo"),
                ("{correction: {reference_ess: 1}}", "env.options.envs, digits reference_ess learner.correction"),
            )
        ),
        (["env.name=mix", "env.options={envs: [{name: digits, algorithm: {advantage: rloo}}]}",
          "learner.advantage=prime", "learner.process_reward={}"],
         "env.options.envs, digits rloo learner.advantage=prime"),
        (["env.name=mix", "env.options={envs: [{name: digits, algorithm: {streams: {rl: 1}}}]}", "rewards=[]",
          "learner.streams={rl: 0, ref_kl: 1}", "learner.distill={teachers: [{}]}"], "rewards"),
        (["env.name=mix", "env.options={envs: [{name: digits, algorithm: {advantage: grpo}}]}",
          "learner.advantage=reinforce_plus_plus", "rollout.group_size=1"],
         "rollout.group_size learner.advantage=grpo"),
        (["rollout.min_episodes=1"], "rollout.min_episodes learner.advantage=grpo"),
        (["rollout.min_episodes=9"], "rollout.min_episodes=9 rollout.group_size=8"),
        (["rollout.episode.tokens=2"], "rollout.episode.tokens=2 rollout.sampling.max_tokens=3"),
        (["rollout.episode.wall_s=300"], "rollout.episode.wall_s=300 rollout.group_deadline_s"),
        (["rollout.episode.tokens=4096"], "rollout.episode.tokens=4096 rollout.engine.max_model_len"),
        (["rollout.overlong={cache_tokens: 4}"], "rollout.overlong.cache_tokens=4 rollout.sampling.max_tokens=3"),
        (["rollout.overlong={cache_tokens: 9}", "rollout.episode.tokens=8"],
         "rollout.overlong.cache_tokens=9 rollout.episode.tokens=8"),
        (["learner.steps=19"], "learner.optimizer.warmup_steps=20 learner.steps=19 learner.optimizer.lr=0.0007"),
        (["learner.advantage=gae", "learner.critic={pretrain_steps: 381}"],
         "learner.optimizer.warmup_steps=20 learner.steps=400 learner.critic.pretrain_steps"),
        (["learner.advantage=gae", "learner.critic={optimizer: {warmup_steps: 401}}"],
         "learner.critic.optimizer.warmup_steps=401 learner.steps=400"),
        (["learner.attention=flash_attention_2"], "learner.attention=flash_attention_2 model.dtype attention=auto"),
        (["rollout.overlong={cache_tokens: 3}", "rewards=[{name: overlong}]"], "rewards rollout.overlong"),
        (["rollout.overlong={cache_tokens: 3}", "learner.advantage=gdpo"], "rollout.overlong gdpo"),
        (["learner.advantage=gdpo", "learner.kl={coefficient: 1, place: reward}"], "gdpo learner.kl.place:"),
        (["learner.advantage=gdpo", "learner.length_penalty=0.2"], "gdpo learner.length_penalty"),
        (["learner.kl={coefficient: 0.1, estimator: k1}"], "learner.kl: 'k1' place: k1+"),
        (["learner.advantage=gae", "learner.critic={pretrain_steps: 400}"],
         "learner.critic.pretrain_steps=400 learner.steps=400"),
        (["learner.advantage=gae"], "learner.advantage: learner.critic"),
        (["learner.advantage=prime"], "learner.advantage: learner.process_reward"),
        (["learner.advantage=online_dpo", "learner.loss={name: reinforce, aggregation: seq-mean-token-sum}"],
         "learner.advantage: learner.kl"),
        (["learner.advantage=online_dpo", "learner.kl={coefficient: 0}", "learner.updates_per_step=2",
          "learner.loss={name: reinforce, aggregation: seq-mean-token-sum}"],
         "learner.advantage: learner.updates_per_step"),
        (["learner.advantage=win_rate", "learner.loss=sppo"], "learner.loss: sppo"),
        (["learner.loss.aggregation=constant"], "learner.loss.aggregation: learner.loss.constant"),
        (["learner.loss=vespo"], "learner.loss: vespo learner.correction.weight:"),
        (["learner.loss=topr"], "learner.loss: topr learner.correction.weight:"),
        (["learner.loss=decoupled_ppo", "learner.correction.proximal=behaviour"],
         "learner.loss: decoupled_ppo learner.correction.proximal learner.correction.weight"),
        (["learner.loss=kimi", "learner.updates_per_step=1"],
         "learner.loss: kimi learner.updates_per_step=1 learner.correction.proximal=recompute"),
        (["learner.loss={name: clip_cov, cov_low: 5}"], "learner.loss: cov_low=5 cov_high=5"),
        (["learner.throttle={min_staleness: 9}"], "learner.throttle.min_staleness=9 buffer.max_staleness=1"),
        (["buffer.filters=[{name: length, min_tokens: 3, max_tokens: 2}]"],
         "buffer.filters.0: min_tokens=3 max_tokens=2"),
        (["buffer.filters=[{name: pf_ppo, keep: 1}]"], "buffer.filters.0.keep=1"),
        (["buffer.filters=[{name: pf_ppo, keep: 4, strategy: best_of_n}]"],
         "buffer.filters.0.strategy: best_of_n learner.advantage=grpo"),
        (["buffer.filters=[{name: length}, {name: dynamic_sampling, score: exact_mach}]"],
         "buffer.filters.1.score: 'exact_mach' 'exact_match' digit_match,"),
        (["rollout.sampling.top_p=0.9"], "rollout.sampling.top_p=0.9 rollout.sampling.top_k"),
        (["rollout.sampling.top_k=64", "rollout.engine.name=hf", "learner.streams.ref_kl=1",
          "learner.distill={teachers: [{}]}"], "learner.distill: rollout.sampling.top_k=64"),
        (["rollout.sampling.top_k=64"], "rollout.sampling.top_k rollout.engine.name=vllm"),
        (["rollout.sampling.temperature=2.5"], "rollout.sampling.temperature=2.5 rollout.engine.name"),
        (["rollout.engine.max_model_len=8", "rollout.sampling.max_tokens=8"],
         "rollout.sampling.max_tokens=8 rollout.engine.max_model_len=8"),
        (["buffer.ticket_deadline_s=300"], "rollout.group_deadline_s=300 buffer.ticket_deadline_s=300"),
        (["learner.wait_deadline_s=300"], "rollout.group_deadline_s=300 learner.wait_deadline_s=300"),
        (["env.tools=[{name: calculator}]", "rollout.sampling.ignore_eos=true"], "env.tools: ignore_eos=true"),
        (["env.tools=[{name: calculator}]", "rollout.sampling.ignore_eos=false", "rollout.episode.tool_format=none"],
         "env.tools: rollout.episode.tool_format=none"),
        (["buffer.limiter={min_ready: 129}"], "buffer.limiter.min_ready=129 128 buffer.max_staleness=1"),
        (["buffer.bind=tcp://127.0.0.1:99999"], "buffer: tcp://127.0.0.1:99999 port"),
        (["buffer.bind=tcp://127.0.0.1:*"], "buffer: tcp://127.0.0.1:* port"),
        (["buffer.bind=http://h:5555"], "buffer: http://h:5555 tcp:// ipc://"),
        (["buffer.bind=tcp://::1:5555"], "buffer: tcp://::1:5555 brackets"),
        (["buffer.endpoint=tcp://[::1:5555"], "buffer: tcp://[::1:5555 brackets"),
        (["buffer.endpoint=tcp://[::1]"], "buffer: tcp://[::1] port"),
        (["buffer.endpoint=tcp://*:5555"], "buffer: tcp://*:5555"),
        (["weights.host='[::1]'"], "weights: '[::1]' brackets"),
        (["weights.host=http://learner"], "weights: 'http://learner'"),
        (["weights.bind=learner:5556"], "weights: 'learner:5556' port"),
        *(
            ([f"redis.url=redis://{url}"], f"redis.url=redis://{url} redis://host:port/db")
            for url in ("h:notaport/0", "h:99999/0", "h:0", "h/abc", "h?db=abc", "h/0?db=-1", "[::1")
        ),
    ],
)  # fmt: skip
def test_combination_or_address_that_cannot_work_is_refused(overrides: list[str], parts: str) -> None:
    require_problem(parts, *overrides)


@pytest.mark.parametrize(("size", "fewest"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 3), (8, 4), (9, 5)])
def test_half_of_a_group_is_enough_by_default(size: int, fewest: int) -> None:
    assert RolloutConfig(group_size=size).fewest_episodes == fewest


def test_combinations_are_reported_together() -> None:
    problems = problems_of(
        DEMO,
        "rewards=[{name: a}, {name: a}]",
        "learner.groups_per_step=5",
        "learner.updates_per_step=2",
        "rollout.group_size=1",
        "rollout.min_episodes=9",
        "buffer.filters=[{name: dynamic_sampling}, {name: pf_ppo, keep: 1}]",
        "buffer.limiter={samples_per_insert: 2}",
    )
    keys = ("rewards", "learner.groups_per_step=5", "rollout.group_size", "buffer.filters.0", "buffer.filters.1.keep")
    for key in (*keys, "rollout.min_episodes=9", "buffer.limiter.max_uses=1", "buffer.limiter.tolerance=0"):
        assert [problem for problem in problems if problem.startswith(key)], (key, problems)
    assert len(problems) == 8


@pytest.mark.parametrize(
    "overrides",
    [
        ["buffer.limiter={min_ready: 128}"],
        ["buffer.limiter={max_uses: 4, samples_per_insert: 2, tolerance: 64}"],
        ["buffer.limiter={samples_per_insert: 0.5, tolerance: 16}"],
        ["buffer.limiter={min_ready: 32, max_uses: 3, samples_per_insert: 3, tolerance: 17}"],
        ["rollout.engine={core: inline, max_sequences: 4, max_model_len: 32}"],
        ["rollout.engine={name: sglang, max_sequences: 4, max_model_len: 32}"],
        ["rollout.overlong={cache_tokens: 3}"],
        ["rollout.overlong={cache_tokens: 8}", "rollout.episode.tokens=8"],
        ["learner.steps=20"],
        ["learner.advantage=gae", "learner.critic={pretrain_steps: 380}"],
        ["learner.attention=flash_attention_2", "model.dtype=bfloat16"],
        ["learner.attention=flash_attention_2", "model.dtype=auto"],
        ["buffer.filters=[{name: dynamic_sampling, score: env}]"],
    ],
)
def test_combination_that_works_is_accepted(overrides: list[str]) -> None:
    load_config(DEMO, overrides)


@pytest.mark.parametrize(
    "url", ["redis://host:6379/0", "redis://[::1]?db=2", "rediss://user@host/0", "unix:///run/redis.sock?db=1"]
)
def test_redis_url_without_a_password_is_accepted(url: str) -> None:
    assert load_config(DEMO, [f"redis.url={url}"]).redis.address == url


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["redis.url=redis://h/0?ssl_cert_reqs=none"], "redis.url ssl_cert_reqs"),
        (["redis.ca_file=ca.crt"], "redis.ca_file TLS"),
        (["redis.url=redis://h", "redis.key_file=k"], "redis.key_file TLS"),
        (["redis.url=rediss://h", "redis.cert_file=c"], "redis.cert_file redis.key_file"),
    ],
)
def test_tls_setting_without_effect_is_refused(overrides: list[str], parts: str) -> None:
    assert [problem for problem in problems_of(DEMO, *overrides) if all(part in problem for part in parts.split())]


def sections(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, model
    for name, field in model.model_fields.items():
        for inner in sections_in(field.annotation):
            yield from sections(inner, f"{path}{name}.")


def described(model: type[BaseModel], name: str) -> bool:
    """Whether a field is documented: here, or where a field of another default was first defined."""
    bases = [base for base in model.__mro__ if issubclass(base, Section) and name in base.model_fields]
    return any(base.model_fields[name].description for base in bases)


def test_every_key_is_documented_where_it_is_defined() -> None:
    undocumented = [
        f"{path}{name}"
        for path, model in sections(RunConfig)
        for name, field in model.model_fields.items()
        if not sections_in(field.annotation) and not described(model, name)
        if not (name == "name" and issubclass(model, NamedSection))  # documented by the section
    ]
    assert undocumented == []
    assert [path for path, model in sections(RunConfig) if not model.__doc__ or model.__doc__ == Section.__doc__] == []


WALK = """
import importlib, pkgutil, sys
of_models = ("device_memory", "image_processor", "state_dict", "tensors", "tokenizer")
heavy = ("__main__", "model_server", *(f"models.{name}" for name in of_models))
for folder in ("configs", "models", "sandbox", "buffer", "env", "rewards"):
    package = importlib.import_module(f"slipstream.{folder}")
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith(heavy):  # programs of their own, and what engines and trainers need of models
            importlib.import_module(module.name)
print(*sorted({"torch", "transformers", "vllm"} & sys.modules.keys()))
print(sum(name.startswith("slipstream.") for name in sys.modules))
"""


def test_packages_below_engine_and_trainer_import_no_torch(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WALK], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    heavy, count = done.stdout.split("\n")[:2]
    assert heavy == ""
    assert int(count) > 20, "the walk found the modules"


@pytest.mark.parametrize(
    ("overrides", "trace", "prometheus"),
    [
        ([], None, None),
        (["tracking.trace=off", "tracking.prometheus=9400"], None, "127.0.0.1:9400"),
        (["tracking.trace=file", "tracking.prometheus=0.0.0.0:9400"], "file", "0.0.0.0:9400"),
        (["tracking.trace=https://collector:4318/", "tracking.prometheus='[::1]:9400'"],
         "https://collector:4318/", "[::1]:9400"),
    ],
)  # fmt: skip
def test_targets_of_traces_and_metrics(overrides: list[str], trace: str | None, prometheus: str | None) -> None:
    tracking = load_config(DEMO, overrides).tracking
    assert (tracking.trace, tracking.prometheus) == (trace, prometheus)
    assert type(tracking).model_validate(tracking.model_dump(mode="json")) == tracking


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["learner.distill.teachers=[{}]"], "learner.distill learner.streams.ref_kl"),
        (["learner.streams.ref_kl=1"], "learner.streams.ref_kl learner.distill learner.kl"),
        (["learner.distill.teachers=[{model: m, url: 'http://h'}]"], "learner.distill.teachers.0 model url"),
        (["learner.distill.teachers=[{model: m, weights: initial}]"], "learner.distill.teachers.0 weights"),
        (["learner.distill.teachers=[{weights: present}]"], "learner.distill.teachers.0 present context"),
        (["learner.distill.teachers=[{context: '{prompt} {x}'}]"], "learner.distill.teachers.0 {x} {solution}"),
        (["learner.distill.teachers=[{context: '{prompt'}]"], "learner.distill.teachers.0 {{"),
        (["learner.distill.teachers=[{context: '{prompt}'}]"], "learner.distill.teachers.0 {reference}"),
        (["learner.distill.teachers=[{env: a}, {env: a}]"], "learner.distill 'a'"),
        (["learner.distill.teachers=[{env: a}]"], "learner.distill.teachers.0.env=a env.options.envs"),
        (["learner.distill.teachers=[{url: 'http://h'}]"], "learner.distill top_k"),
        (["learner.distill={teachers: [{}], loss: advantage, top_k: 3}"], "learner.distill top_k"),
        (
            ["learner.distill={teachers: [{url: 'http://h'}], top_k: 3}", "rollout.sampling.temperature=0.5"],
            "learner.distill.teachers rollout.sampling.temperature=0.5",
        ),
        (
            ["learner.distill.teachers=[{context: '{reference}'}]", "learner.parallel.cp=2"],
            "learner.distill.teachers learner.parallel.cp=1",
        ),
    ],
)
def test_distillation_that_can_not_work_is_refused(overrides: list[str], parts: str) -> None:
    assert [problem for problem in problems_of(DEMO, *overrides) if all(part in problem for part in parts.split())]


def test_distillation_alone_needs_no_rewards() -> None:
    overrides = ["learner.distill.teachers=[{model: m}]", "learner.streams={rl: 0, ref_kl: 1}", "rewards=[]"]
    assert not load_config(DEMO, overrides).rewards
