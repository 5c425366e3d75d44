"""Rollout servers: engine, sampling, concurrency."""

from typing import Any, Literal

from pydantic import Field

from slipstream.configs.schema.base import Seconds, Section, UserPath


class SamplingConfig(Section):
    """How answers are drawn. There is no top-p and no top-k: both renormalise the distribution and bias the ratios."""

    max_tokens: int = Field(default=1024, ge=1)
    """Most tokens of one answer."""
    temperature: float = Field(default=1.0, ge=0.01)
    """Sampling temperature; the learner divides its logits by it too. vLLM takes a lower one for 0.01, and none above
    2."""
    ignore_eos: bool = False
    """Go on to `max_tokens` even after the end-of-sequence token: for answers of a fixed length."""


class OverlongConfig(Section):
    """A penalty for answers that come close to `rollout.sampling.max_tokens` (DAPO, arXiv 2503.14476)."""

    cache_tokens: int = Field(ge=1)
    """Over the last so many tokens the penalty grows, linearly from 0."""
    penalty: float = Field(default=1.0, gt=0)
    """What is taken off the reward of an answer that is cut off."""


class EngineConfig(Section):
    """The inference engine inside a rollout server."""

    name: Literal["vllm", "sglang", "hf"] = "vllm"
    """`hf` is transformers' own generation: slow, and there for every model that transformers knows."""
    core: Literal["inline", "process", "server"] = "process"
    """For vLLM. `process` runs AsyncLLM with its engine core in a process of its own: right for GPUs. `inline` steps
    the engine in a thread of the server: half the CPU time per short answer, right for tiny models on a CPU. `server`
    starts vLLM's OpenAI-compatible server and speaks HTTP with it: needed for data parallelism."""
    python: UserPath | None = None
    """Interpreter of the environment that a server (`sglang`, or vLLM's `server`) is installed in; unset: this one."""
    max_model_len: int = Field(default=4096, ge=8)
    """Most tokens of prompt and answer together."""
    max_sequences: int = Field(default=256, ge=1)
    """Most sequences that the engine runs at once."""
    kv_cache_bytes: int | None = Field(default=None, ge=1 << 20)
    """KV-cache size; unset: the engine's own rule on a GPU, 1 GiB on a CPU. `hf` has no use for it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further engine arguments, passed through unchanged (tensor_parallel_size, gpu_memory_utilization, …)."""
    start_deadline_s: Seconds = 600.0
    """How long the engine may take to start."""
    give_up_after: int = Field(default=5, ge=0)
    """A crashed engine is started again; after so many crashes in a row without an answer the server exits; 0: at the
    first."""

    @property
    def nccl(self) -> Literal["nccl", "nccl_sglang"] | None:
        """The way of weights straight into its GPUs, if it has any, as the weight channel calls it."""
        if self.name == "sglang":
            return "nccl_sglang"
        return "nccl" if self.name == "vllm" and self.core == "process" else None


class RolloutConfig(Section):
    """What every rollout server does."""

    group_size: int = Field(default=8, ge=1, le=16384)
    """Answers per task (the group)."""
    groups_in_flight: int = Field(default=32, ge=1, lt=1_000_000)
    """Most tickets that one server holds at once: its credits."""
    min_groups_in_flight: int = Field(default=1, ge=1)
    """Groups that a server works on at least, when the engine is short of KV cache."""
    sampling: SamplingConfig = SamplingConfig()
    overlong: OverlongConfig | None = None
    """Penalty for too long answers, recorded as the score `overlong`; unset: none."""
    engine: EngineConfig = EngineConfig()
    group_deadline_s: Seconds = 300.0
    """Generation of one group may take this long; then the answers that are missing are aborted and counted. The env
    may take as long for its task. Less than `buffer.ticket_deadline_s` and `learner.wait_deadline_s`."""
    min_group_size: int | None = Field(default=None, ge=2)
    """A group that lacks answers at its deadline is used if it has at least this many; unset: only if it has all."""

    def problems(self) -> list[str]:
        """Combinations within this section that can't work."""
        engine, problems = self.engine, []
        if (self.min_group_size or 0) > self.group_size:
            problems.append(
                f"rollout.min_group_size={self.min_group_size} is more than rollout.group_size={self.group_size}"
            )
        if self.min_groups_in_flight > self.groups_in_flight:
            problems.append(
                f"rollout.min_groups_in_flight={self.min_groups_in_flight} is more than "
                f"rollout.groups_in_flight={self.groups_in_flight}"
            )
        asks_for_groups = (engine.name, engine.core) == ("vllm", "server") and "max_num_seqs" not in engine.options
        if asks_for_groups and self.group_size > engine.max_sequences:
            problems.append(
                f"rollout.group_size={self.group_size} is more than "
                f"rollout.engine.max_sequences={engine.max_sequences}, and vLLM's server (rollout.engine.core=server) "
                "refuses to answer a prompt more often than that"
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
        if self.overlong is not None and self.overlong.cache_tokens > self.sampling.max_tokens:
            problems.append(
                f"rollout.overlong.cache_tokens={self.overlong.cache_tokens} is more than "
                f"rollout.sampling.max_tokens={self.sampling.max_tokens}"
            )
        return problems
