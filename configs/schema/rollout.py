"""Rollout servers: engine, sampling, concurrency."""

from math import prod
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.network import is_loopback
from slipstream.configs.schema.base import Seconds, Section, UserPath
from slipstream.configs.schema.weights import direct_transport


class SamplingConfig(Section):
    """Sampling of answers. There is no top-p and no top-k: both renormalise the distribution and bias the ratios."""

    max_tokens: int = Field(default=1024, ge=1)
    """Maximal tokens of one answer."""
    temperature: float = Field(default=1.0, ge=0.01)
    """Sampling temperature, by which the learner divides its logits too; vLLM allows at most 2."""
    ignore_eos: bool = False
    """Continue to `max_tokens` after the end-of-sequence token, for answers of a fixed length."""


class OverlongConfig(Section):
    """Penalty for answers close to `rollout.sampling.max_tokens` (DAPO, arXiv 2503.14476); for episodes of several
    turns, close to `rollout.episode.tokens`."""

    cache_tokens: int = Field(ge=1)
    """Number of last tokens over which the penalty grows linearly from 0; at most those of an answer, or episode."""
    penalty: float = Field(default=1.0, gt=0)
    """Penalty of an answer that is cut off."""


class EpisodeConfig(Section):
    """Episodes of several turns: context, tool calls and budgets. An episode that a budget ends keeps its reward."""

    history: Literal["sampled", "template"] = "sampled"
    """Context of the later turns. `sampled`: all that was generated, reasoning too. `template`: what the chat template
    makes of the dialogue; where it rewrites earlier turns, the episode continues in another trajectory."""
    tool_format: Literal["auto", "hermes", "qwen3_xml", "llama_json", "none"] = "auto"
    """Format of tool calls in an answer. `auto`: that of the chat template, in episodes that offer tools."""
    tool_prompt: Literal["template", "system"] = "template"
    """Place of the tools' schemas in a chat prompt. `template`: where the chat template puts them. `system`: a system
    message that asks for calls in `tool_format` (`auto`: that of the chat template, else `hermes`), with results as
    messages of the user: for chat templates without tools."""
    turns: int | None = Field(default=None, ge=1)
    """Maximal answers of an episode; unset: no limit."""
    tokens: int | None = Field(default=None, ge=1)
    """Maximal tokens of an episode after its prompt, observations included; unset: `rollout.sampling.max_tokens`."""
    observation_tokens: int | None = Field(default=None, ge=1)
    """Maximal tokens of an observation's contents; the end of a longer one is replaced by a mark, and counted as
    `score/env/observations_cut`. Unset: no limit."""
    wall_s: Seconds | None = None
    """Time of an episode; what is being generated then is cut off. Unset: `rollout.group_deadline_s`, at which an
    unfinished episode is lost."""


class GatewayConfig(Section):
    """The endpoint at which agents call the policy, of envs that run agents. Sessions are bounded by
    `rollout.episode`."""

    bind: str = "127.0.0.1:0"
    """Address on loopback at which it listens; port 0: a free one. Agents on other hosts reach it through a reverse
    tunnel or a proxy with TLS."""
    url: str | None = None
    """Address under which agents reach it, such as `https://host/gateway`; unset: that of `bind`."""


GPUS_OF_AN_ENGINE: Final = (
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    *("tp_size", "pp_size", "dp_size"),  # SGLang's other names
)
"""Options of engines whose product is the number of their GPUs."""


class EngineConfig(Section):
    """The inference engine inside a rollout server."""

    name: Literal["vllm", "sglang", "hf"] = "vllm"
    """`hf` is the generation of transformers: slow, for models that the other engines lack."""
    core: Literal["auto", "inline", "process"] = "auto"
    """For vLLM. `process` runs AsyncLLM with its engine core in a process of its own: for GPUs. `inline` steps the
    engine in a thread of the server: half the CPU time per short answer, for small models on a CPU. `auto`: `inline` on
    a host without a GPU, if `options` ask for one process."""
    python: UserPath | None = None
    """Interpreter of the environment with the engine's server (`sglang`); unset: this one."""
    max_model_len: int = Field(default=4096, ge=8)
    """Maximal tokens of prompt and answer together."""
    max_sequences: int = Field(default=256, ge=1)
    """Maximal sequences that the engine processes at once."""
    kv_cache_bytes: int | None = Field(default=None, ge=1 << 20)
    """Size of the KV cache; unset: the engine's default on a GPU, 1 GiB on a CPU."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further engine arguments, passed unchanged (tensor_parallel_size, gpu_memory_utilization, …)."""
    start_deadline_s: Seconds = 600.0
    """Time for the engine to start."""
    give_up_after: int = Field(default=5, ge=0)
    """Crashes in a row, without an answer in between, after which the server exits instead of restarting the engine; 0:
    the first one."""

    @property
    def gpus(self) -> int:
        """GPUs that one engine uses. Raises: ConfigError when an option is no number of GPUs."""
        sizes = [(name, self.options[name]) for name in GPUS_OF_AN_ENGINE if name in self.options]
        problems = [
            f"rollout.engine.options.{name}={size!r} must be a whole number from 1"
            for name, size in sizes
            if not isinstance(size, int) or size < 1
        ]
        if problems:
            raise ConfigError(problems)
        return prod(size for _, size in sizes)

    @property
    def direct(self) -> str | None:
        """Name of the weight transport straight into the engine's GPUs, if it may have one."""
        kind = self.name if self.name != "vllm" else "vllm/inline" if self.core == "inline" else "vllm/process"
        return direct_transport(kind)


class RolloutConfig(Section):
    """Settings of every rollout server."""

    servers: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """Rollout servers that `slipstream up` starts. `auto`: one, or as many as the GPUs of `gpus.rollout` are for."""
    group_size: int = Field(default=8, ge=1, le=16384)
    """Answers per task."""
    groups_in_flight: Literal["auto"] | Annotated[int, Field(ge=1, lt=1_000_000)] = 32
    """Maximal tickets that one server holds at once; it holds fewer while they do not fit into the engine's KV cache.
    `auto`: as many as fit. It begins with `engine.max_sequences` / `group_size` and grows, up to
    `engine.max_sequences`, until the KV cache is full."""
    sampling: SamplingConfig = SamplingConfig()
    skip_long_prompts: bool = False
    """Read all tasks at the start and leave out those whose prompts leave no room for `sampling.max_tokens` in
    `engine.max_model_len`. Otherwise each costs a ticket when it comes, and is counted (`prompt_too_long`)."""
    overlong: OverlongConfig | None = None
    """Penalty for overlong answers, recorded as the score `overlong`; unset: none."""
    episode: EpisodeConfig = EpisodeConfig()
    gateway: GatewayConfig = GatewayConfig()
    engine: EngineConfig = EngineConfig()
    group_deadline_s: Seconds = 300.0
    """Time to generate one group; then its missing answers are aborted and counted. The env has as long to return its
    task. Less than `buffer.ticket_deadline_s` and `learner.wait_deadline_s`."""
    notice_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Time for the groups in work after SIGTERM, such as the notice of a preemption: no further tickets are taken, and
    those unfinished by then go to other servers. 0: at once. `slipstream slurm`, `ray`, `k8s` and `sky` take 20 instead
    of 0."""
    min_episodes: int | None = Field(default=None, ge=1)
    """Episodes with which a group to train on is used although others were not finished at its deadline or can't be
    scored; unset: half of `group_size`, rounded up, and at least 2 of several."""

    @property
    def fewest_episodes(self) -> int:
        """`min_episodes`, or its default."""
        return self.min_episodes or min(self.group_size, max(2, (self.group_size + 1) // 2))

    @property
    def episode_tokens(self) -> int:
        """Maximal tokens of an episode of several turns after its prompt."""
        return self.episode.tokens or self.sampling.max_tokens

    def problems(self) -> list[str]:
        """Combinations within this section that can't work."""
        engine, problems = self.engine, [*self._episode_problems(), *self._gateway_problems()]
        if self.fewest_episodes > self.group_size:
            problems.append(
                f"rollout.min_episodes={self.min_episodes} is more than rollout.group_size={self.group_size}"
            )
        if engine.name == "vllm" and self.sampling.temperature > 2:
            problems.append(
                f"rollout.sampling.temperature={self.sampling.temperature:g} is more than the 2 that vLLM allows; "
                "lower it, or choose another rollout.engine.name"
            )
        if self.sampling.max_tokens >= engine.max_model_len:
            problems.append(
                f"rollout.sampling.max_tokens={self.sampling.max_tokens} leaves no room for a prompt in "
                f"rollout.engine.max_model_len={engine.max_model_len}"
            )
        if self.overlong is not None and self.overlong.cache_tokens > self.episode_tokens:
            key = "episode.tokens" if self.episode.tokens else "sampling.max_tokens"
            problems.append(
                f"rollout.overlong.cache_tokens={self.overlong.cache_tokens} is more than "
                f"rollout.{key}={self.episode_tokens}"
            )
        return problems

    def _gateway_problems(self) -> list[str]:
        host, _, port = self.gateway.bind.rpartition(":")
        if not (port.isdecimal() and int(port) < 65536):
            return [f"rollout.gateway.bind={self.gateway.bind} must be HOST:PORT, such as 127.0.0.1:0"]
        if not is_loopback(host.strip("[]")):
            return [
                f"rollout.gateway.bind={self.gateway.bind} is not on loopback, and keys would cross the network in the "
                "clear: bind to 127.0.0.1, put a reverse tunnel or a proxy with TLS in front, and name its address in "
                "rollout.gateway.url"
            ]
        return []

    def _episode_problems(self) -> list[str]:
        episode, problems = self.episode, []
        if episode.tool_prompt == "system" and episode.tool_format == "none":
            problems.append(
                "rollout.episode.tool_prompt=system asks for calls in a format, and tool_format=none has none; choose "
                "rollout.episode.tool_format, or leave it out"
            )
        if episode.tokens is not None and episode.tokens < self.sampling.max_tokens:
            problems.append(
                f"rollout.episode.tokens={episode.tokens} is less than the tokens of one answer, "
                f"rollout.sampling.max_tokens={self.sampling.max_tokens}"
            )
        if self.episode_tokens >= self.engine.max_model_len and episode.tokens is not None:
            problems.append(
                f"rollout.episode.tokens={episode.tokens} leaves no room for a prompt in "
                f"rollout.engine.max_model_len={self.engine.max_model_len}"
            )
        if episode.wall_s is not None and episode.wall_s >= self.group_deadline_s:
            problems.append(
                f"rollout.episode.wall_s={episode.wall_s:g} must be less than "
                f"rollout.group_deadline_s={self.group_deadline_s:g}, or unfinished episodes are lost before"
            )
        return problems
