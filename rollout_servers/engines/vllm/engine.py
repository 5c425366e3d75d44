"""The common part of both vLLM engines: sampling parameters and completions in vLLM's terms."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.rollout_servers.engines.base import (
    BaseEngine,
    Completion,
    EngineError,
    ExpertReader,
    Generation,
    PromptImage,
    Request,
    RequestRefused,
    check_vocabulary,
)
from slipstream.rollout_servers.engines.vllm.arguments import ADAPTER_ID
from slipstream.rollout_servers.tally import Tally

SCORE_PRIORITY = -1
"""vLLM's priority of a text to score: a whole fleet's update waits for it. Answers have 0."""


class VllmEngine(BaseEngine):
    """vLLM; weights have no checksums, because it fuses and prepacks tensors.

    Attributes:
        experts: reads the experts in its answers; None if it returns none.
    """

    experts: ExpertReader | None = None

    async def generate(self, request: Request) -> list[Completion]:
        params = sampling_params(self.generation, request)
        output = await self._ask(
            request.compact_ids, params, images=request.images, tally=request.tally, deadline_s=request.deadline_s
        )
        if request.images and output.prompt_token_ids != list(request.prompt_ids):
            raise RequestRefused(
                f"vLLM has {len(output.prompt_token_ids or ())} tokens where the rollout server has "
                f"{len(request.prompt_ids)}: their image processors differ; leave "
                "rollout.engine.options.mm_processor_kwargs out"
            )
        return completions(output, self.experts)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        output = await self._ask(token_ids, scoring_params(), tally=Tally(), deadline_s=None, priority=SCORE_PRIORITY)
        return prompt_logprobs(output)

    @abstractmethod
    async def _ask(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        images: Sequence[PromptImage] = (),
        tally: Tally,
        deadline_s: float | None,
        priority: int = 0,
    ) -> RequestOutput:
        """vLLM's output for a request; `tally` follows its tokens. Raises: RequestRefused, EngineError."""


def token_prompt(prompt_ids: Sequence[int], images: Sequence[PromptImage], *, vocabulary: int) -> Any:
    """vLLM's prompt. Raises: RequestRefused for a token id outside the model's vocabulary."""
    check_vocabulary(prompt_ids, vocabulary)
    prompt: dict[str, Any] = {"prompt_token_ids": list(prompt_ids)}
    if images:
        prompt["multi_modal_data"] = {"image": [image.pixels for image in images]}
    return prompt


def adapter_request(vllm_config: Any) -> LoRARequest | None:
    """The adapter of every request of an engine with `model.lora`; None without.

    Its values change with each version, its id stays, so that requests in flight go on with the new ones.
    """
    if vllm_config.lora_config is None:
        return None
    return LoRARequest("policy", ADAPTER_ID, lora_path="in memory")  # never read: it is loaded before any request


def sampling_params(generation: Generation, request: Request) -> SamplingParams:
    """Parameters of a request; greedy answers have temperature 0."""
    return SamplingParams(
        n=request.samples,
        temperature=0.0 if request.greedy else generation.temperature,
        max_tokens=generation.max_tokens if request.max_tokens is None else request.max_tokens,
        ignore_eos=generation.ignore_eos,
        logit_bias=dict.fromkeys(generation.banned, -math.inf) or None,
        stop_token_ids=list(generation.stop_token_ids),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_params() -> SamplingParams:
    """Parameters to score a prompt; the log-probs of its tokens are always at temperature 1."""
    return SamplingParams(
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completions(output: RequestOutput, experts: ExpertReader | None = None) -> list[Completion]:
    """The answers of a finished request. Raises: EngineError when log-probs or version spans are missing.

    Of several samples vLLM reports the cached tokens of the last to finish; they stand for all, whose mean they are on
    average.
    """
    return [_completion(answer, experts, output) for answer in output.outputs]


def unfinished(output: RequestOutput | None, *, version: int) -> list[Completion] | None:
    """Answers so far of a request of a crashed engine; tokens without a version count as those of `version`.

    None for a prompt that was scored, and where there is no output.
    """
    if output is None or output.prompt_logprobs is not None:
        return None
    for answer in output.outputs:
        if answer.weight_versions is None:
            answer.weight_versions = [WeightVersionSpan(str(version), 0, len(answer.token_ids))]
    return completions(output)


def tokens_so_far(processor: Any, request: str) -> int:
    """Tokens of a request that vLLM's output processor has; may be called in any thread."""
    states = [processor.request_states.get(each) for each in tuple(processor.external_req_ids.get(request, ()))]
    running = [state for state in states if state is not None]
    whole = running[0].parent_req if running else None
    finished = [] if whole is None else [answer for answer in whole.output_aggregator if answer is not None]
    lengths = [len(answer.token_ids) for answer in finished]
    lengths += [state.detokenizer.num_output_tokens() for state in running]
    return sum(lengths)


def prompt_logprobs(output: RequestOutput) -> list[float]:
    """log-prob of each token of a scored prompt but the first. Raises: EngineError when they are missing."""
    flat: Any = output.prompt_logprobs
    if flat is None:
        raise EngineError("vLLM did not score a prompt")
    return list(flat.logprobs)


def _completion(answer: CompletionOutput, experts: ExpertReader | None, output: RequestOutput) -> Completion:
    logprobs: Any = answer.logprobs
    if logprobs is None or answer.weight_versions is None:
        raise EngineError("vLLM returned an answer without log-probs or without weight versions")
    reason, routed = answer.finish_reason, None
    if experts is not None:
        tokens = len(output.prompt_token_ids or ()) + len(answer.token_ids)
        routed = experts.read(answer.routed_experts, tokens=tokens)
    return Completion(
        token_ids=answer.token_ids,
        logprobs=logprobs.logprobs,
        spans=[VersionSpan(version=int(s.version), start=s.start, end=s.end) for s in answer.weight_versions],
        # `error` concerns this request alone, for example a KV cache that could not be loaded.
        finish_reason="abort" if reason is None or reason == "error" else reason,
        routed_experts=routed,
        cached_tokens=output.num_cached_tokens or 0,
    )
