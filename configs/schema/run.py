"""One run: the root of the configuration, and the sections that belong to no single process."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.errors import suggest
from slipstream.configs.schema.algorithms import GROUP_RELATIVE, REGULARISED
from slipstream.configs.schema.base import Seconds, Section, UserPath
from slipstream.configs.schema.buffer import BufferConfig, RedisConfig
from slipstream.configs.schema.learner import LearnerConfig
from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.configs.schema.weights import SecurityConfig, WeightsConfig


class RunSection(Section):
    """Identity of the run and where its files go."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    """Name of the run: its folder, and the prefix of its keys in Redis."""
    dir: UserPath = Path("runs")
    """Folder that holds the run's folder."""
    seed: int = Field(default=0, ge=0, le=2**62)
    """Seed of the task order, the initial weights of a built model and, with its name, each server's sampling."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""


class ModelConfig(Section):
    """The policy: a Hugging Face folder, or a tiny model built on the spot."""

    path: UserPath | None = None
    """Folder with config, weights and tokenizer, as `save_pretrained` writes it."""
    build: Literal["digits"] | None = None
    """Build a model with random weights and its tokenizer in the run folder instead of reading `path`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the engine and of the learner's forward and backward pass (its master weights are fp32)."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.path is None and self.build is None:
            raise ValueError("give model.path, the folder of a model, or model.build: digits")
        if self.path is not None and self.build is not None:
            raise ValueError(
                f"model.path={self.path} and model.build={self.build} exclude each other: add model.build=null to take "
                "the model in the folder"
            )
        return self


class EnvConfig(Section):
    """The tasks to learn."""

    name: str = "digits"
    """A built-in (`digits`, `jsonl`), an entry point of group `slipstream.envs`, or `module:attribute`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the env's factory."""


class RewardConfig(Section):
    """One term of the reward."""

    name: str
    """Built in (`exact_match`, `digit_match`), an entry point of group `slipstream.rewards`, or `module:attribute`."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Its share in the sum that is trained on; 0 records the score without training on it."""


class ScoringConfig(Section):
    """How rewards are run."""

    workers: int = Field(default=2, ge=0)
    """Worker processes. 0 scores inside the rollout server, without a deadline: for cheap functions you trust."""
    deadline_s: Seconds = 10.0
    """Time for one group's scores; a worker that takes longer is killed and the group is dropped and counted."""


class EvalConfig(Section):
    """Greedy evaluation on held-out tasks, by the rollout servers, pinned to one policy version."""

    every_steps: int = Field(default=0, ge=0)
    """Evaluate each time this many steps are done, or what is published next after them; 0: only before the first and
    after the last step."""
    tasks: int = Field(default=256, ge=0)
    """Held-out tasks per evaluation (fewer if the env has fewer); 0 switches evaluation off."""
    reward: str | None = None
    """The score that is averaged, named like a reward; unset: the `rewards` that are trained on, summed by weight."""
    deadline_s: Seconds = 120.0
    """How long the learner waits at its end for the last evaluation. Servers keep a version that is evaluated for as
    long, but for half of `weights.deadline_s` at most."""


class SwanlabConfig(Section):
    """SwanLab tracker (extra `trackers`)."""

    project: str = "slipstream"
    """SwanLab project."""
    mode: Literal["local", "offline", "cloud", "disabled"] = "local"
    """`local` writes into the run folder and needs no network."""


class TrackingConfig(Section):
    """Where metrics go besides `metrics.jsonl`, which is always written."""

    swanlab: SwanlabConfig | None = None
    """Also log to SwanLab."""


class RunConfig(Section):
    """Everything one run needs; every process reads the same file."""

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
    security: SecurityConfig = SecurityConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        problems = []
        if not self.rewards:  # not min_length: that also complains when a term is wrong
            problems.append("rewards must name at least one term")
        elif not any(term.weight for term in self.rewards):
            problems.append("rewards: none has a weight, so there is nothing to learn from")
        names = [reward.name for reward in self.rewards]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            problems.append(f"rewards name {', '.join(twice)} more than once; give each term one weight")
        if self.learner.groups_per_step % self.learner.updates_per_step:
            problems.append(
                f"learner.groups_per_step={self.learner.groups_per_step} must be a multiple of "
                f"learner.updates_per_step={self.learner.updates_per_step}"
            )
        if self.rollout.group_size < 2 and self._group_relative:
            problems.append(
                f"rollout.group_size must be at least 2 for group-relative advantages such as "
                f"learner.advantage={self.learner.advantage.name}"
            )
        problems += self._filter_problems()
        problems += self._overlong_problems()
        problems += self._algorithm_problems()
        problems += self._limit_problems()
        problems += self._rollout_problems()
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def _group_relative(self) -> bool:
        return self.learner.advantage.name in GROUP_RELATIVE

    def _algorithm_problems(self) -> list[str]:
        """Parts of the objective that don't belong together."""
        learner, problems = self.learner, []
        if (learner.advantage.name == "gae") != (learner.critic is not None):
            problems.append("learner.advantage: gae and learner.critic need each other; give both or neither")
        if (learner.loss.aggregation == "constant") != (learner.loss.constant is not None):
            problems.append("learner.loss.aggregation: constant and learner.loss.constant need each other")
        coupled = learner.correction.proximal == "behaviour" or learner.correction.weight == "none"
        if learner.loss.name == "decoupled_ppo" and coupled:
            problems.append(
                "learner.loss: decoupled_ppo needs learner.correction.proximal other than behaviour and "
                "learner.correction.weight other than none; without them it is ppo"
            )
        if learner.loss.name == "topr" and learner.correction.weight != "none":
            problems.append(
                "learner.loss: topr weighs by the ratio to the behaviour policy itself; "
                "set learner.correction.weight: none, or staleness is paid for twice"
            )
        if learner.advantage.name == "gdpo" and learner.kl is not None and learner.kl.place == "reward":
            problems.append(
                "learner.advantage: gdpo looks at the reward terms, where learner.kl.place: reward does not reach; "
                "use place: loss"
            )
        if learner.critic is not None and learner.critic.pretrain_steps >= learner.steps:
            problems.append(
                f"learner.critic.pretrain_steps={learner.critic.pretrain_steps} must be less than "
                f"learner.steps={learner.steps}, or the policy is never trained"
            )
        first_update_only = learner.updates_per_step == 1 and learner.correction.proximal == "recompute"
        if learner.loss.name in REGULARISED and first_update_only:
            problems.append(
                f"learner.loss: {learner.loss.name} keeps π_θ near π_prox, which is π_θ itself with "
                "learner.updates_per_step=1 and learner.correction.proximal=recompute: take more updates, or "
                "proximal: behaviour"
            )
        if learner.throttle is not None and learner.throttle.min_staleness > self.buffer.max_staleness:
            problems.append(
                f"learner.throttle.min_staleness={learner.throttle.min_staleness} is more than "
                f"buffer.max_staleness={self.buffer.max_staleness}"
            )
        return problems

    def _limit_problems(self) -> list[str]:
        """Shards and limits that groups could not get past."""
        limiter, step, shards = self.buffer.limiter, self.learner.groups_per_step, self.buffer.shards
        problems = []
        if step % shards:
            problems.append(f"learner.groups_per_step={step} must be a multiple of buffer.shards={shards}")
            shards = 1  # what is wrong with the limiter is said all the same
        problems += limiter.problems(groups_per_step=step, shards=shards)
        most = (self.buffer.max_staleness + 1) * self.groups_per_version
        if limiter.min_ready > most:
            problems.append(
                f"buffer.limiter.min_ready={limiter.min_ready} is more than the {most} groups that "
                f"buffer.max_staleness={self.buffer.max_staleness} lets in"
            )
        return problems

    def _filter_problems(self) -> list[str]:
        """Filters that would leave nothing to train on."""
        problems = []
        for number, chosen in enumerate(self.buffer.filters):
            if chosen.name == "pf_ppo" and chosen.keep < 2 and self._group_relative:
                problems.append(
                    f"buffer.filters.{number}.keep={chosen.keep} must be at least 2 for group-relative advantages"
                )
            if chosen.name == "dynamic_sampling" and self.rollout.group_size < 2:
                problems.append(
                    f"buffer.filters.{number} (dynamic_sampling) drops every group of one answer; "
                    "raise rollout.group_size"
                )
            if chosen.name == "pf_ppo" and chosen.strategy == "best_of_n" and self._group_relative:
                problems.append(
                    f"buffer.filters.{number}.strategy: best_of_n leaves one answer, as often as it is drawn, which "
                    f"group-relative advantages such as learner.advantage={self.learner.advantage.name} give nothing"
                )
            if chosen.name == "length" and chosen.max_tokens is not None and chosen.min_tokens > chosen.max_tokens:
                problems.append(
                    f"buffer.filters.{number}.min_tokens={chosen.min_tokens} is more than its "
                    f"max_tokens={chosen.max_tokens}"
                )
            terms = [reward.name for reward in self.rewards]
            if chosen.name == "dynamic_sampling" and chosen.score is not None and chosen.score not in terms:
                problems.append(
                    f"buffer.filters.{number}.score: no reward term gives {chosen.score!r}"
                    f"{suggest(chosen.score, terms)}; rewards name {', '.join(terms)}"
                )
        return problems

    def _rollout_problems(self) -> list[str]:
        """Answers that would never come, or not in time."""
        rollout, problems = self.rollout, []
        if (rollout.min_group_size or 0) > rollout.group_size:
            problems.append(
                f"rollout.min_group_size={rollout.min_group_size} is more than rollout.group_size={rollout.group_size}"
            )
        if rollout.min_groups_in_flight > rollout.groups_in_flight:
            problems.append(
                f"rollout.min_groups_in_flight={rollout.min_groups_in_flight} is more than "
                f"rollout.groups_in_flight={rollout.groups_in_flight}"
            )
        engine = rollout.engine
        asks_for_groups = (engine.name, engine.core) == ("vllm", "server") and "max_num_seqs" not in engine.options
        if asks_for_groups and rollout.group_size > engine.max_sequences:
            problems.append(
                f"rollout.group_size={rollout.group_size} is more than "
                f"rollout.engine.max_sequences={engine.max_sequences}, and vLLM's server (rollout.engine.core=server) "
                "refuses to answer a prompt more often than that"
            )
        if engine.name == "vllm" and rollout.sampling.temperature > 2:
            problems.append(
                f"rollout.sampling.temperature={rollout.sampling.temperature:g} is more than the 2 that vLLM allows; "
                "lower it, or choose another rollout.engine.name"
            )
        if rollout.sampling.max_tokens >= rollout.engine.max_model_len:
            problems.append(
                f"rollout.sampling.max_tokens={rollout.sampling.max_tokens} leaves no room for a prompt in "
                f"rollout.engine.max_model_len={rollout.engine.max_model_len}"
            )
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

    def _overlong_problems(self) -> list[str]:
        """A penalty for length that could not be told from other things, or would have no effect."""
        overlong, limit, problems = self.rollout.overlong, self.rollout.sampling.max_tokens, []
        if overlong is None:
            return []
        if overlong.cache_tokens > limit:
            problems.append(
                f"rollout.overlong.cache_tokens={overlong.cache_tokens} is more than "
                f"rollout.sampling.max_tokens={limit}"
            )
        if any(reward.name == "overlong" for reward in self.rewards):
            problems.append("rewards name overlong, which is the score of rollout.overlong; rename the reward")
        if self.learner.advantage.name == "gdpo":
            problems.append("rollout.overlong is no reward term, and learner.advantage: gdpo adds up only those")
        return problems

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.run.dir / self.run.name

    @property
    def paths(self) -> RunPaths:
        """Paths inside the run's folder."""
        return RunPaths(self.folder)

    @property
    def evaluated(self) -> tuple[RewardConfig, ...]:
        """Terms of the score that evaluations average."""
        return self.rewards if self.eval.reward is None else (RewardConfig(name=self.eval.reward),)

    @property
    def greedy_baseline(self) -> bool:
        """Whether every group needs the reward of a greedy answer to its task."""
        return self.learner.advantage.name == "remax"

    @property
    def groups_per_version(self) -> int:
        """Groups that the learner consumes between two published versions."""
        return self.learner.groups_per_step * self.weights.publish_every_steps
