"""Between our terms and vLLM's."""

from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.buffer.wire.weights import Form, Manifest
from slipstream.rollout_servers.engines.base import Completion, EngineError, RequestRefused
from slipstream.rollout_servers.engines.vllm.arguments import Generation


def token_prompt(prompt_ids: Sequence[int], *, vocabulary: int) -> Any:
    """vLLM's prompt.

    Raises: RequestRefused for a token id outside the model's vocabulary: without a tokenizer vLLM does not look, and
    dies of it.
    """
    strange = [token for token in prompt_ids if not 0 <= token < vocabulary]
    if strange:
        raise RequestRefused(f"token {strange[0]} is not in the model's vocabulary of {vocabulary}: wrong tokenizer?")
    return {"prompt_token_ids": list(prompt_ids)}


def sampling_params(generation: Generation, *, samples: int, greedy: bool) -> SamplingParams:
    """vLLM's sampling parameters; greedy answers have temperature 0."""
    return SamplingParams(
        n=samples,
        temperature=0.0 if greedy else generation.temperature,
        max_tokens=generation.max_tokens,
        ignore_eos=generation.ignore_eos,
        stop_token_ids=list(generation.stop_token_ids),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completions(output: RequestOutput) -> list[Completion]:
    """The answers of a finished request. Raises: EngineError when vLLM left out log-probs or version spans."""
    return [_completion(answer) for answer in output.outputs]


def _completion(answer: CompletionOutput) -> Completion:
    logprobs: Any = answer.logprobs
    if logprobs is None or answer.weight_versions is None:
        raise EngineError("vLLM returned an answer without log-probs or without weight versions")
    return Completion(
        token_ids=answer.token_ids,
        logprobs=logprobs.logprobs,
        spans=[VersionSpan(version=int(s.version), start=s.start, end=s.end) for s in answer.weight_versions],
        finish_reason=answer.finish_reason or "abort",
    )


def join_info(group: Form, *, bucket_bytes: int) -> dict[str, Any]:
    """vLLM's init_info of a transfer engine, for entering `group`."""
    if group.transport == "nccl":
        return {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": group.rank,
            "world_size": group.world,
            "packed": True,
            "packed_buffer_size_bytes": bucket_bytes,
        }
    return {
        "host": group.host,
        "port": group.port,
        "epoch": group.epoch,
        "rank_offset": group.rank,
        "world_size": group.world,
        "deadline_s": group.deadline_s,
    }


def update_info(manifest: Manifest, transport: str) -> dict[str, Any]:
    """vLLM's update_info for one version, received by `transport`."""
    bucket = {} if transport == "nccl" else {"bucket_bytes": manifest.bucket_bytes}
    return bucket | {
        "names": [tensor.name for tensor in manifest.tensors],
        "dtype_names": [tensor.dtype for tensor in manifest.tensors],
        "shapes": [tensor.shape for tensor in manifest.tensors],
    }
