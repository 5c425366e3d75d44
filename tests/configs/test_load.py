"""One YAML file and overrides in, one validated configuration or every mistake out."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from slipstream.configs import load
from slipstream.configs.load import dump_config, load_config
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.base import NamedSection, Section, sections_in
from tests.configs.conftest import problems_of

DEMO = Path(load.__file__).parent / "demo.yaml"


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_three_mistakes_are_reported_at_once_with_a_guess_at_what_was_meant(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "model: {build: digits}\nbuffer: {max_stalenes: 4}\nlearner: {steps: none}\n"
        "rewards: [{nam: exact_match, name: x}]\n",
    )
    problems = problems_of(path, "rollout.group_size")
    assert sorted(problems) == [
        "buffer.max_stalenes: unknown key (did you mean 'max_staleness'?)",
        "learner.steps: Input should be a valid integer, unable to parse string as an integer (given: 'none')",
        "override 'rollout.group_size' must look like key.path=value",
        "rewards.0.nam: unknown key (did you mean 'name'?)",
    ]


def test_combinations_that_cannot_work_are_reported_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, "model: {build: digits}\nrewards: [{name: a}, {name: a}]\n")
    problems = problems_of(path, "learner.groups_per_step=5", "learner.updates_per_step=2", "rollout.group_size=1")
    assert problems == (
        "rewards name a more than once; give each term one weight",
        "learner.groups_per_step=5 must be a multiple of learner.updates_per_step=2",
        "rollout.group_size must be at least 2 for group-relative advantages such as learner.advantage=grpo",
    )


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("- a\n", "must hold a mapping of sections, not a list"),
        ("a: [", ":1: not valid YAML: expected the node content, but found '<stream end>'"),
        ("", "model: Field required"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, part: str) -> None:
    (problem,) = problems_of(written(tmp_path, text))
    assert part in problem


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert problems_of(tmp_path / "none.yaml") == (f"there is no configuration file {tmp_path / 'none.yaml'}",)


def test_a_dumped_configuration_loads_as_an_equal_one(tmp_path: Path) -> None:
    overrides = [
        "model={path: /models/x}",
        "tracking.swanlab.mode=offline",
        "learner.optimizer.betas=[0.8, 0.95]",
        "env.options={most: .inf, of: {each: [-.inf]}, rate: 1e-7, word: '1e-7', day: '2026-01-31'}",
    ]
    config = load_config(DEMO, overrides)
    assert load_config(written(tmp_path, dump_config(config))) == config


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("[{name: pf_pp, keep: 4}]", "buffer.filters.0.name: unknown 'pf_pp' (did you mean 'pf_ppo'?)"),
        ("[{name: pf_ppo, keep: 4, exponnt: 2}]", "buffer.filters.0.exponnt: unknown key (did you mean 'exponent'?)"),
        ("[{name: length}, {name: pf_ppo}]", "buffer.filters.1.keep: Field required"),
    ],
)
def test_a_mistake_in_a_filter_is_named_where_the_user_wrote_it(value: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(DEMO, [f"buffer.filters={value}"])
    assert caught.value.problems == (said,)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("buffer.max_staleness=true", "buffer: max_staleness should be a number, not true"),
        ("buffer.retention={max_age_s: off}", "buffer.retention: max_age_s should be a number, not false"),
        ("buffer.filters=[{name: pf_ppo, keep: yes}]", "buffer.filters.0: keep should be a number, not true"),
        ("run={name: off}", "run.name: must be a text; quote what else would be a number or a switch (given: false; "
         "YAML reads on, yes, off and no so, too)"),
    ],
)  # fmt: skip
def test_a_switch_is_neither_a_number_nor_a_word(override: str, said: str) -> None:
    assert problems_of(DEMO, override) == (said,)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("env=digits", "env: must be a mapping of keys, such as {name: …} (given: 'digits')"),
        ("learner.loss=3", "learner.loss: must be a mapping of keys, such as {name: …} (given: 3)"),
        ("learner=null", "learner: must be a mapping of keys, such as {steps: …} (given: null)"),
        ("rewards=[exact_match]", "rewards.0: must be a mapping of keys, such as {name: …} (given: 'exact_match')"),
        ("buffer.filters=[length]", "buffer.filters.0: must be a mapping of keys, such as {name: …} (given: 'length')"),
        ("env.options=3", "env.options: must be a mapping of keys (given: 3)"),
        ("rewards=exact_match", "rewards: must be a list, such as [a, b] (given: 'exact_match')"),
        ("rewards={name: exact_match}", "rewards: must be a list, such as [a, b]"),
        ("run={dir: 3}", "run.dir: must be a path (given: 3)"),
        (
            "run={name: 1e5}",
            "run.name: must be a text; quote what else would be a number or a switch (given: 100000.0)",
        ),
        ("rewards.0.weight=2", "override 'rewards.0.weight=2': 'rewards' is a list: give it whole"),
    ],
)
def test_a_value_of_another_kind_is_refused_in_the_words_of_yaml(override: str, said: str) -> None:
    assert problems_of(DEMO, override) == (said,)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.path=/models/x"],
         "model: model.path=/models/x and model.build=digits exclude each other: add model.build=null to take the "
         "model in the folder"),
        (["model.build=null"], "model: give model.path, the folder of a model, or model.build: digits"),
        (["rollout.overlong={cache_tokens: 4}"],
         "rollout.overlong.cache_tokens=4 is more than rollout.sampling.max_tokens=3"),
        (["rollout.overlong={cache_tokens: 3}", "rewards=[{name: overlong}]"],
         "rewards name overlong, which is the score of rollout.overlong; rename the reward"),
        (["rollout.overlong={cache_tokens: 3}", "learner.advantage=gdpo"],
         "rollout.overlong is no reward term, and learner.advantage: gdpo adds up only those"),
        (["learner.kl={coefficient: 0.1, estimator: k1}"],
         "learner.kl: estimator 'k1' is for place: reward; its gradient knows nothing of the reference: take k1+, k2 "
         "or k3"),
        (["learner.advantage=gae", "learner.critic={pretrain_steps: 400}"],
         "learner.critic.pretrain_steps=400 must be less than learner.steps=400, or the policy is never trained"),
        (["learner.loss=kimi", "learner.updates_per_step=1"],
         "learner.loss: kimi keeps π_θ near π_prox, which is π_θ itself with learner.updates_per_step=1 and "
         "learner.correction.proximal=recompute: take more updates, or proximal: behaviour"),
        (["rewards=[{name: digit_match, weight: 0}, {name: exact_match, weight: 0}]"],
         "rewards: none has a weight, so there is nothing to learn from"),
        (["learner.loss={name: clip_cov, cov_low: 5}"],
         "learner.loss: cov_low=5 must be less than cov_high=5"),
        (["learner.optimizer.betas=[0.9, 1]"],
         "learner.optimizer.betas.1: Input should be less than 1 (given: 1)"),
        (["buffer.filters=[{name: length, min_tokens: 3, max_tokens: 2}]"],
         "buffer.filters.0: min_tokens=3 is more than max_tokens=2"),
        (["buffer.filters=[{name: pf_ppo, keep: 4, strategy: best_of_n}]"],
         "buffer.filters.0.strategy: best_of_n leaves one answer, as often as it is drawn, which "
         "group-relative advantages such as learner.advantage=grpo give nothing"),
        (["rollout.groups_in_flight=4", "rollout.min_groups_in_flight=5"],
         "rollout.min_groups_in_flight=5 is more than rollout.groups_in_flight=4"),
        (["rollout.engine.core=server", "rollout.engine.max_sequences=4"],
         "rollout.group_size=8 is more than rollout.engine.max_sequences=4, and vLLM's server "
         "(rollout.engine.core=server) refuses to answer a prompt more often than that"),
        (["rollout.sampling.temperature=2.5"],
         "rollout.sampling.temperature=2.5 is more than the 2 that vLLM allows; lower it, or choose another "
         "rollout.engine.name"),
        (["rollout.engine.max_model_len=8", "rollout.sampling.max_tokens=8"],
         "rollout.sampling.max_tokens=8 leaves no room for a prompt in rollout.engine.max_model_len=8"),
        (["buffer.ticket_deadline_s=300"],
         "rollout.group_deadline_s=300 must be less than buffer.ticket_deadline_s=300, or slow groups come when they "
         "are void"),
        (["learner.wait_deadline_s=300"],
         "rollout.group_deadline_s=300 must be less than learner.wait_deadline_s=300, or the learner gives up before "
         "slow groups come"),
        (["buffer.filters=[{name: length}, {name: dynamic_sampling, score: exact_mach}]"],
         "buffer.filters.1.score: no reward term gives 'exact_mach' (did you mean 'exact_match'?); "
         "rewards name digit_match, exact_match"),
    ],
)  # fmt: skip
def test_what_could_not_work_is_refused(overrides: list[str], said: str) -> None:
    assert problems_of(DEMO, *overrides) == (said,)


@pytest.mark.parametrize(
    ("limiter", "shards", "said"),
    [
        ("{min_ready: 129}", 1,
         "buffer.limiter.min_ready=129 is more than the 128 groups that buffer.max_staleness=1 lets in"),
        ("{min_ready: 33, samples_per_insert: 1, tolerance: 64}", 2,
         "buffer.limiter.min_ready=33 must be a multiple of buffer.shards=2 if buffer.limiter.samples_per_insert is "
         "set"),
        ("{min_ready: 32, max_uses: 3, samples_per_insert: 3, tolerance: 17}", 4,
         "buffer.limiter.tolerance=17 lets leases and insertions block each other; with these settings it must be at "
         "least 20"),
    ],
)  # fmt: skip
def test_a_rate_limit_that_would_stop_the_groups_is_refused(limiter: str, shards: int, said: str) -> None:
    assert problems_of(DEMO, f"buffer.limiter={limiter}", f"buffer.shards={shards}") == (said,)


@pytest.mark.parametrize(
    "limiter",
    [
        "{min_ready: 128}",
        "{max_uses: 4, samples_per_insert: 2, tolerance: 64}",
        "{samples_per_insert: 0.5, tolerance: 16}",
        "{min_ready: 32, max_uses: 3, samples_per_insert: 3, tolerance: 17}",
    ],
)
def test_a_rate_limit_that_lets_groups_pass_is_taken(limiter: str) -> None:
    load_config(DEMO, [f"buffer.limiter={limiter}"])


@pytest.mark.parametrize(
    "engine",
    [
        "{core: server, max_sequences: 8}",
        "{core: server, max_sequences: 4, options: {max_num_seqs: 8}}",
        "{core: inline, max_sequences: 4}",
        "{name: sglang, core: server, max_sequences: 4}",
    ],
)
def test_a_group_may_be_larger_than_what_runs_at_once_where_answers_take_turns(engine: str) -> None:
    assert load_config(DEMO, [f"rollout.engine={engine}", "rollout.engine.max_model_len=32"]).rollout.group_size == 8


def test_an_overlong_cache_may_be_as_long_as_an_answer() -> None:
    overlong = load_config(DEMO, ["rollout.overlong={cache_tokens: 3}"]).rollout.overlong
    assert overlong is not None
    assert (overlong.cache_tokens, overlong.penalty) == (3, 1.0)


def test_a_cluster_needs_an_address() -> None:
    with pytest.raises(ConfigError, match=r"redis: redis\.cluster needs redis\.url"):
        load_config(DEMO, ["redis.cluster=true"])


def test_settings_that_would_leave_nothing_to_train_on_are_refused_together() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(
            DEMO,
            [
                "buffer.filters=[{name: pf_ppo, keep: 1}]",
                "buffer.limiter={samples_per_insert: 2}",
                "buffer.shards=5",
                "rollout.min_group_size=9",
            ],
        )
    assert len(caught.value.problems) == 5


def test_the_demo_loads() -> None:
    assert load_config(DEMO).model.build == "digits"


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
        if not (name == "name" and issubclass(model, NamedSection))  # the section says what its name stands for
    ]
    assert undocumented == []
    assert [path for path, model in sections(RunConfig) if not model.__doc__ or model.__doc__ == Section.__doc__] == []


WALK = """
import importlib, pkgutil, sys
for folder in ("configs", "buffer", "env", "rewards"):
    package = importlib.import_module(f"slipstream.{folder}")
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print(*sorted({"torch", "transformers", "vllm"} & sys.modules.keys()))
print(sum(name.startswith("slipstream.") for name in sys.modules))
"""


def test_configs_buffer_env_and_rewards_start_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", WALK], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    heavy, count = done.stdout.split("\n")[:2]
    assert heavy == ""
    assert int(count) > 20, "the walk found the modules"


def test_options_are_the_same_for_a_process_that_reads_the_resolved_configuration(tmp_path: Path) -> None:
    config = load_config(DEMO, ["env.options={day: 2026-01-31, sign: =, rates: [.inf, 1e-3], deep: {'1': null}}"])
    assert load_config(written(tmp_path, dump_config(config))).env.options == config.env.options
