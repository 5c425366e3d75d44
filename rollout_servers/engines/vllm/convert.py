"""Between our terms and vLLM's."""

from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.rollout_servers.engines.base import Completion, EngineError, Generation
from slipstream.rollout_servers.engines.prompts import check_vocabulary


def token_prompt(prompt_ids: Sequence[int], *, vocabulary: int) -> Any:
    """vLLM's prompt. Raises: RequestRefused for a token id outside the model's vocabulary."""
    check_vocabulary(prompt_ids, vocabulary)
    return {"prompt_token_ids": list(prompt_ids)}


def sampling_params(
    generation: Generation, *, samples: int, greedy: bool, max_tokens: int | None = None
) -> SamplingParams:
    """How answers are drawn; greedy ones have temperature 0. `max_tokens` takes the place of the configured one."""
    return SamplingParams(
        n=samples,
        temperature=0.0 if greedy else generation.temperature,
        max_tokens=generation.max_tokens if max_tokens is None else max_tokens,
        ignore_eos=generation.ignore_eos,
        stop_token_ids=list(generation.stop_token_ids),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_params() -> SamplingParams:
    """What makes vLLM score a prompt; its tokens' log-probs are always of the distribution at temperature 1."""
    return SamplingParams(
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completions(output: RequestOutput) -> list[Completion]:
    """The answers of a finished request. Raises: EngineError when vLLM left out log-probs or version spans."""
    return [_completion(answer) for answer in output.outputs]


def unfinished(output: RequestOutput, *, version: int) -> list[Completion] | None:
    """What a request that died with its engine had come to; tokens without a stamp are taken for `version`'s.

    None for a prompt that was to be scored.
    """
    if output.prompt_logprobs is not None:
        return None
    for answer in output.outputs:
        if answer.weight_versions is None:
            answer.weight_versions = [WeightVersionSpan(str(version), 0, len(answer.token_ids))]
    return completions(output)


def prompt_logprobs(output: RequestOutput) -> list[float]:
    """log-prob of each token of a scored prompt but the first. Raises: EngineError when vLLM left them out."""
    flat: Any = output.prompt_logprobs
    if flat is None:
        raise EngineError("vLLM did not score a prompt")
    return list(flat.logprobs)


def _completion(answer: CompletionOutput) -> Completion:
    logprobs: Any = answer.logprobs
    if logprobs is None or answer.weight_versions is None:
        raise EngineError("vLLM returned an answer without log-probs or without weight versions")
    reason = answer.finish_reason
    return Completion(
        token_ids=answer.token_ids,
        logprobs=logprobs.logprobs,
        spans=[VersionSpan(version=int(s.version), start=s.start, end=s.end) for s in answer.weight_versions],
        # An error of this request alone, such as a KV cache that could not be loaded, has cut it short too.
        finish_reason="abort" if reason is None or reason == "error" else reason,
    )
