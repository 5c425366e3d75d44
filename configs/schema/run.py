"""The root of the configuration, and the sections that several kinds of processes share."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.errors import suggest
from slipstream.configs.schema.base import Seconds, Section, UserPath
from slipstream.configs.schema.buffer import BufferConfig, RedisConfig
from slipstream.configs.schema.learner import AlgorithmConfig, LearnerConfig
from slipstream.configs.schema.model import FLASH_IN_FLOAT32, ModelConfig
from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.configs.schema.tracking import TrackingConfig
from slipstream.configs.schema.weights import SecurityConfig, WeightsConfig

ENV_SCORE: Final = "env"
"""The name under which the sum of a session's rewards is recorded."""
PORT_COUNT: Final = 5
"""Ports of a run on one machine."""


def port_defaults(base: int) -> dict[str, dict[str, object]]:
    """The defaults that follow from `run.port_base`, by section and key."""
    buffer = f"tcp://127.0.0.1:{base + 1}"
    return {
        "redis": {"port": base},
        "buffer": {"bind": buffer, "endpoint": buffer},
        "weights": {"control_port": base + 2, "store_port": base + 3, "stream_port": base + 4},
    }


class RunSection(Section):
    """Identity of the run and the place of its files."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    """Name of the run: its folder, and the prefix of its keys in Redis."""
    dir: UserPath = Path("runs")
    """Folder that holds the run's folder."""
    seed: int = Field(default=0, ge=0, le=2**62)
    """Seed of the task order, of a built model's weights and, with the server's name, of each server's sampling."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""
    port_base: int | None = Field(default=None, ge=1, le=65536 - PORT_COUNT)
    """First of five ports: the defaults of `redis.port`, `buffer.bind` with `buffer.endpoint` (on loopback),
    `weights.control_port`, `weights.store_port` and `weights.stream_port`, in this order. Unset: `slipstream up`
    chooses free ones, if all are on loopback, and writes them into the run folder's config.yaml."""


def gpu_numbers(text: str) -> tuple[int, ...]:
    """The numbers in a list such as "0-5,7". Raises: ValueError when it is none, or names a GPU twice."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:\s*-\s*(\d{1,4}))?\s*", part)
        if match is None:
            raise ValueError(f'{text!r} is no list of GPUs such as "0-5,7"')
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"{text!r} names {'no GPU' if not numbers else 'a GPU twice'}")
    return tuple(numbers)


def _gpu_list(value: Any) -> Any:
    """Checks a list of GPUs; YAML takes that of a single one for a number."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str) and text != "auto":
        gpu_numbers(text)
    return text


GpuList = Annotated[str, BeforeValidator(_gpu_list)]


class GpusConfig(Section):
    """GPUs of this machine that `slipstream up` assigns; `gpus: auto` leaves both to it."""

    rollout: GpuList = "auto"
    """GPUs of the rollout servers, such as "0-5", numbered as CUDA numbers those in CUDA_VISIBLE_DEVICES;
    `engine.options.tensor_parallel_size` of them each. `auto`: those that the learner leaves; with both `auto` half of
    them, or with `--fresh` by the idle shares of the run that is moved aside."""
    learner: GpuList = "auto"
    """GPUs of the learner, one for each rank."""


def _gpus_alone(value: Any) -> Any:
    return {} if value == "auto" else value


class ToolConfig(Section):
    """A tool, or several that belong together, which the policy may call."""

    name: str
    """Built in (`calculator`, `python`, `search`, `mcp`), an entry point of group `slipstream.tools`, or
    `module:attribute`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the tool's factory."""
    deadline_s: Seconds = 30.0
    """Time for one call; then its result is an error that names the deadline."""
    max_output_characters: int = Field(default=8192, ge=16)
    """Characters of a result that are kept: its beginning and its end, with a mark between."""


class EnvConfig(Section):
    """The env, which supplies the tasks."""

    name: str = "digits"
    """A built-in (`agent`, `colours`, `digits`, `lookup`, `mix`, `rows`, `gymnasium`, `harbor`, `openenv`,
    `reasoning_gym`, `skyrl_gym`, `textarena` or `verifiers`), an entry point of group `slipstream.envs`, or
    `module:attribute`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the env's factory."""
    tools: tuple[ToolConfig, ...] = ()
    """Tools for the tasks of an env without sessions: the policy calls them until it answers without a call."""


class MixedEnvConfig(EnvConfig):
    """An env of `env.options.envs`, where `env.name` is `mix`."""

    label: str | None = None
    """Name of its tasks in scores and for rewards; unset: the env's name."""
    weight: float = Field(default=1.0, ge=0)
    """Share of the train tasks, relative to the others; 0: evaluation only."""
    algorithm: AlgorithmConfig | None = None
    """Advantage, loss, correction and streams of its groups; unset: those of `learner`."""


def _algorithm(index: int, env: Mapping[str, Any]) -> AlgorithmConfig:
    """The algorithm of the env at `index` in a mixture. Raises: ValueError."""
    try:
        return AlgorithmConfig.model_validate(env["algorithm"])
    except ValidationError as error:
        problems = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors(include_url=False)]
        raise ValueError(
            "\n".join(
                f"env.options.envs.{index}.algorithm.{key}: {what.removeprefix('Value error, ')}"
                for key, what in problems
            )
        ) from None


class RewardConfig(Section):
    """One term of the reward."""

    name: str
    """Name of its score; of its function too, unless `function` is set: a built-in one, an entry point of group
    `slipstream.rewards`, or `module:attribute`."""
    function: str | None = None
    """Name of the function, for a term with another name: two terms by the same function have different names."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the constructor, if the function is a class."""
    concurrency: int | None = Field(default=None, ge=1)
    """For an async reward: calls that are open at a time, of each rollout server. The others wait, which is no part of
    their time. Unset: 32, or no limit for a reward that limits its own time, such as `judge`."""
    retries: int = Field(default=2, ge=0)
    """Further tries of a failed call, after pauses of about 1, 4, 16 and then 30 s."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Weight in the reward's sum; 0 records the score without training on it."""


class ScoringConfig(Section):
    """Execution of the reward functions."""

    workers: int = Field(default=2, ge=0)
    """Worker processes; 0 scores inside the rollout server, plain functions without a deadline: for cheap, trusted
    ones."""
    deadline_s: Seconds = 30.0
    """Time of one call of a reward without limits of its own: for one answer, or as much for each of a group's. Then it
    is ended, which costs its episodes."""


class EvalConfig(Section):
    """Evaluation of one policy version on held-out tasks, by the rollout servers."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between two evaluations, of the next version that is published; 0: only before the first and after the last
    step."""
    tasks: int = Field(default=256, ge=0)
    """Held-out tasks per evaluation, at most as many as the env has; 0: no evaluation."""
    samples: int = Field(default=1, ge=1, le=1024)
    """Answers per held-out task: 1, a greedy one; k > 1, sampled at `rollout.sampling.temperature`, for mean@k, pass@k
    and maj@k."""
    reward: str | None = None
    """Reward whose mean is reported; unset: the weighted sum of `rewards`."""
    hold_s: Seconds | None = None
    """Time that a server keeps the evaluated version, at most, until its answers are generated; newer weights wait
    meanwhile. Answers that they interrupt then fail. Unset: `rollout.group_deadline_s`, which one answer may take."""
    deadline_s: Seconds = 600.0
    """Time that the learner waits at its end for the last evaluation."""


class RunConfig(Section):
    """The configuration of one run; all processes read the same file."""

    run: RunSection = RunSection()
    model: ModelConfig
    env: EnvConfig = EnvConfig()
    rewards: tuple[RewardConfig, ...] = (RewardConfig(name="exact_match"),)
    """Terms of the reward, summed by weight; each name once."""
    scoring: ScoringConfig = ScoringConfig()
    eval: EvalConfig = EvalConfig()
    redis: RedisConfig = RedisConfig()
    buffer: BufferConfig = BufferConfig()
    rollout: RolloutConfig = RolloutConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsConfig = WeightsConfig()
    gpus: Annotated[GpusConfig, BeforeValidator(_gpus_alone)] = GpusConfig()
    security: SecurityConfig = SecurityConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="before")
    @classmethod
    def _ports(cls, given: Any) -> Any:
        """Fills in the ports that follow from `run.port_base`, where the keys are not given."""
        base = given["run"].get("port_base") if isinstance(given, dict) and isinstance(given.get("run"), dict) else None
        if not isinstance(base, int):
            return given
        filled = dict(given)
        for name, defaults in port_defaults(base).items():
            section = given.get(name) or {}
            if name == "buffer" and isinstance(section, dict) and {"bind", "endpoint"} & section.keys():
                continue  # they belong together
            if isinstance(section, dict):
                filled[name] = defaults | section
        return filled

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        """Reports all combinations that can't work at once, those within one section too."""
        of_rl = self.rl_problems() if self.uses_buffer else []
        problems = [*self.learner.problems(), *self._model_problems(), *of_rl]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def rl_problems(self) -> list[str]:
        """Combinations that can't work in RL."""
        return [
            *self._reward_problems(),
            *self.learner.rl_problems(),
            *self._algorithm_problems(),
            *self._distill_problems(),
            *self._group_problems(),
            *self._filter_problems(),
            *self._overlong_problems(),
            *self._limit_problems(),
            *self.rollout.problems(),
            *self._deadline_problems(),
            *self._tool_problems(),
            *self._transport_problems(),
        ]

    def _distill_problems(self) -> list[str]:
        learner = self.learner
        if learner.distill is None:
            return []
        problems = learner.distill.problems(self.rollout.sampling, context_parallel=learner.parallel.cp)
        labels = [str(each.get("label") or each.get("name")) for each in self._mixed_envs]
        problems += [
            f"learner.distill.teachers.{number}.env={teacher.env} is no label of an env in env.options.envs"
            + (f"; there are {', '.join(labels)}" if labels else ", which a mixture has")
            for number, teacher in enumerate(learner.distill.teachers)
            if teacher.env is not None and teacher.env not in labels
        ]
        if not any(algorithm.streams.ref_kl for algorithm in self.algorithms.values()):
            problems.append("learner.distill has no weight; set learner.streams.ref_kl, such as 1")
        return problems

    def _reward_problems(self) -> list[str]:
        trained = any(algorithm.streams.rl for algorithm in self.algorithms.values())
        if trained and not self.rewards:  # not min_length: that also complains when a term is wrong
            return ["rewards must name at least one term"]
        problems = []
        if trained and not any(term.weight for term in self.rewards):
            problems.append("rewards: none has a weight, so there is nothing to learn from")
        twice = sorted(name for name, count in Counter(term.name for term in self.rewards).items() if count > 1)
        if twice:
            problems.append(f"rewards name {', '.join(twice)} more than once; give each term one weight")
        return problems

    def _algorithm_problems(self) -> list[str]:
        """Algorithms of single envs that can't work, or not beside the learner's."""
        problems = []
        for label, algorithm in list(self.algorithms.items())[1:]:
            where = f"env.options.envs, algorithm of {label}"
            own, common = algorithm.advantage, self.learner.advantage
            if own != common and {own.name, common.name} & {"gae", "prime"}:
                problems.append(
                    f"{where}: {own.name} beside learner.advantage={common.name}: gae and prime train a model on the "
                    "answers of all envs; set them under learner.advantage alone, for all envs"
                )
            elif algorithm.correction.reference_ess != self.learner.correction.reference_ess:
                problems.append(
                    f"{where}: correction.reference_ess acts on the learning rate, which all envs share; set it under "
                    "learner.correction"
                )
            else:
                of_learner = self.learner.objective_problems()
                problems += [f"{where}: {each}" for each in algorithm.objective_problems() if each not in of_learner]
        return problems

    def _group_problems(self) -> list[str]:
        size, fewest = self.rollout.group_size, self.rollout.fewest_episodes
        if min(size, fewest) >= 2 or (relative := self._group_relative) is None:
            return []
        key = "group_size" if size < 2 else "min_episodes"
        return [f"rollout.{key} must be at least 2 for group-relative advantages such as learner.advantage={relative}"]

    @property
    def _group_relative(self) -> str | None:
        """Name of an advantage that compares the answers of a group; None if there is none."""
        advantages = [algorithm.advantage for algorithm in self.algorithms.values()]
        return next((advantage.name for advantage in advantages if advantage.group_relative), None)

    def _filter_problems(self) -> list[str]:
        """Filters or a curriculum that would leave nothing to train on."""
        problems, terms = [], [reward.name for reward in self.rewards]
        if self.buffer.curriculum is not None and self.rollout.group_size < 2:
            problems.append(
                "buffer.curriculum skips tasks whose answers are all solved or all unsolved, and a group of one answer "
                "always is; raise rollout.group_size"
            )
        for number, chosen in enumerate(self.buffer.filters):
            key = f"buffer.filters.{number}"
            if chosen.name == "pf_ppo" and chosen.keep < 2 and self._group_relative:
                problems.append(f"{key}.keep={chosen.keep} must be at least 2 for group-relative advantages")
            if chosen.name == "pf_ppo" and chosen.strategy == "best_of_n" and self._group_relative:
                problems.append(
                    f"{key}.strategy: best_of_n leaves one answer, as often as it is drawn, which group-relative "
                    f"advantages such as learner.advantage={self._group_relative} give nothing"
                )
            if chosen.name == "dynamic_sampling" and self.rollout.group_size < 2:
                problems.append(f"{key} (dynamic_sampling) drops every group of one answer; raise rollout.group_size")
            if chosen.name == "dynamic_sampling" and chosen.score not in (None, ENV_SCORE, *terms):
                problems.append(
                    f"{key}.score: no reward term gives {chosen.score!r}{suggest(str(chosen.score), terms)}; rewards "
                    f"name {', '.join(terms)}"
                )
        return problems

    def _overlong_problems(self) -> list[str]:
        """A length penalty without effect, or with an ambiguous name."""
        if self.rollout.overlong is None:
            return []
        problems = []
        if any(reward.name == "overlong" for reward in self.rewards):
            problems.append("rewards name overlong, which is the score of rollout.overlong; rename the reward")
        if any(algorithm.advantage.name == "gdpo" for algorithm in self.algorithms.values()):
            problems.append("rollout.overlong is no reward term, and learner.advantage: gdpo adds up only those")
        return problems

    def _limit_problems(self) -> list[str]:
        """Limits that would stop leases or insertions for good."""
        limiter, step = self.buffer.limiter, self.learner.groups_per_step
        problems, throttle = [], self.learner.throttle
        if throttle is not None and throttle.min_staleness > self.buffer.max_staleness:
            problems.append(
                f"learner.throttle.min_staleness={throttle.min_staleness} is more than "
                f"buffer.max_staleness={self.buffer.max_staleness}"
            )
        problems += limiter.problems(groups_per_step=step)
        most = (self.buffer.max_staleness + 1) * self.groups_per_version
        if limiter.min_ready > most:
            problems.append(
                f"buffer.limiter.min_ready={limiter.min_ready} is more than the {most} groups that "
                f"buffer.max_staleness={self.buffer.max_staleness} lets in"
            )
        return problems

    def _tool_problems(self) -> list[str]:
        """Settings with which no call of a tool would be found."""
        problems = []
        if self.env.tools and self.rollout.episode.tool_format == "none":
            problems.append("env.tools: rollout.episode.tool_format=none finds no calls in answers; leave it out")
        if self.env.tools and self.rollout.sampling.ignore_eos:
            problems.append("env.tools: rollout.sampling.ignore_eos=true cuts every call off; leave it out")
        return problems

    def _transport_problems(self) -> list[str]:
        if self.model.lora is not None and self.weights.direct:
            return [f"model.lora: adapters don't go by weights.transport={self.weights.transport}; set auto"]
        return []

    def _model_problems(self) -> list[str]:
        """Settings of the model with which no trainer can work."""
        problems = []
        if self.model.dtype == "float32" and self.learner.attention.startswith("flash_attention"):
            problems.append(
                FLASH_IN_FLOAT32.format(self.learner.attention)
            )  # the learner, which resolves `auto`, refuses the same
        if self.model.lora is not None and self.model.train_vision_encoder:
            problems.append("model.lora leaves the vision encoder as it is; remove model.train_vision_encoder")
        return problems

    def _deadline_problems(self) -> list[str]:
        """Deadlines after which slow groups would come too late."""
        rollout, problems = self.rollout, []
        if rollout.group_deadline_s >= self.buffer.ticket_deadline_s:
            problems.append(
                f"rollout.group_deadline_s={rollout.group_deadline_s:g} must be less than "
                f"buffer.ticket_deadline_s={self.buffer.ticket_deadline_s:g}, or slow groups come when they are void"
            )
        if rollout.group_deadline_s >= self.learner.wait_deadline_s:
            problems.append(
                f"rollout.group_deadline_s={rollout.group_deadline_s:g} must be less than "
                f"learner.wait_deadline_s={self.learner.wait_deadline_s:g}, or the learner gives up before "
                "slow groups come"
            )
        return problems

    @property
    def algorithms(self) -> dict[str, LearnerConfig]:
        """The learner's settings under "", and under the label of each env with an algorithm of its own with that.

        Raises: ValueError when an algorithm is wrong.
        """
        of_envs = {
            str(each.get("label") or each.get("name")): self.learner.with_algorithm(_algorithm(index, each))
            for index, each in enumerate(self._mixed_envs)
            if each.get("algorithm") is not None
        }
        return {"": self.learner, **of_envs}

    @property
    def _mixed_envs(self) -> Sequence[Mapping[str, Any]]:
        """Configurations of the envs of a mixture."""
        envs = self.env.options.get("envs") if self.env.name == "mix" else None
        return [each for each in envs if isinstance(each, Mapping)] if isinstance(envs, list | tuple) else []

    @property
    def paths(self) -> RunPaths:
        """Paths inside the run's folder."""
        return RunPaths(self.run.dir / self.run.name)

    @property
    def uses_buffer(self) -> bool:
        """True if the run has a buffer, Redis, rollout servers, an env and rewards; otherwise it is a learner alone."""
        return self.learner.uses_buffer

    @property
    def evaluated(self) -> tuple[RewardConfig, ...]:
        """Terms of the score that evaluations report; empty without evaluations."""
        if not self.eval.tasks:
            return ()
        name = self.eval.reward
        if name is None:
            return self.rewards
        term = next((term for term in self.rewards if term.name == name), RewardConfig(name=name))
        return (term.model_copy(update={"weight": 1.0}),)

    @property
    def scored(self) -> tuple[RewardConfig, ...]:
        """Terms of the reward, and with weight 0 those that are only evaluated."""
        trained = {term.name for term in self.rewards}
        others = [term.model_copy(update={"weight": 0.0}) for term in self.evaluated if term.name not in trained]
        return (*self.rewards, *others)

    @property
    def eval_hold_s(self) -> float:
        """Time that a server keeps a version under evaluation."""
        return self.eval.hold_s or self.rollout.group_deadline_s

    @property
    def greedy_baseline(self) -> bool:
        """True if every group needs the reward of a greedy answer to its task."""
        return any(algorithm.advantage.name == "remax" for algorithm in self.algorithms.values())

    @property
    def groups_per_version(self) -> int:
        """Groups that the learner consumes between two published versions."""
        return self.learner.groups_per_step * self.weights.publish_every_steps
