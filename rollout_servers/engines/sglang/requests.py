"""What SGLang's server is asked, in its native API."""

from collections.abc import Sequence
from typing import Any

from slipstream.buffer.wire.weights import Form, TensorInfo
from slipstream.rollout_servers.engines.base import Generation
from slipstream.rollout_servers.engines.http.answers import PIECE_TOKENS

GENERATE = "/generate"
ABORT = "/abort_request"
PAUSE = "/pause_generation"
CONTINUE = "/continue_generation"
UPDATE = "/update_weights_from_disk"
JOIN_GROUP = "/init_weights_update_group"
LEAVE_GROUP = "/destroy_weights_update_group"
BEGIN_UPDATE = "/begin_weight_update"
RECEIVE = "/update_weights_from_distributed"
END_UPDATE = "/end_weight_update"
LOADS = "/v1/loads"
INFO = "/server_info"
BACKEND = "nccl"
"""torch's, for transfer groups."""


def request_id(number: int) -> str:
    """An id for a request. All are of one length: SGLang aborts every request whose id begins with the one it hears."""
    return f"slipstream-{number:016}"


def generate_request(
    request: str,
    prompt_ids: Sequence[int],
    generation: Generation,
    *,
    greedy: bool,
    max_tokens: int | None,
    context: int,
) -> dict[str, Any]:
    """Asks for a stream of one answer, which ends where the context does: SGLang refuses what could go further."""
    most = generation.max_tokens if max_tokens is None else max_tokens
    sampling = {
        "temperature": 0.0 if greedy else generation.temperature,
        "max_new_tokens": min(most, context - len(prompt_ids)),
        "ignore_eos": generation.ignore_eos,
        "stop_token_ids": list(generation.stop_token_ids),
        "stream_interval": PIECE_TOKENS,
    }
    return {
        "rid": request,
        "input_ids": list(prompt_ids),
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": True,
    }


def score_request(token_ids: Sequence[int]) -> dict[str, Any]:
    """Asks for the log-probs of the tokens of a prompt."""
    return {
        "input_ids": list(token_ids),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def abort_request(request: str) -> dict[str, Any]:
    """Ends a request with what it has come to."""
    return {"rid": request}


def pause_request() -> dict[str, Any]:
    """Takes running requests out of the KV cache; they are computed anew, under the weights that are there then."""
    return {"mode": "retract"}


def update_request(folder: str, version: int) -> dict[str, Any]:
    """Loads the weights in a folder, and forgets the prefixes that were computed under the old ones."""
    return {"model_path": folder, "weight_version": str(version), "flush_cache": True}


def group_name(group: Form) -> str:
    """Of a transfer group; the learner looks for its members in the store under this name."""
    return f"epoch{group.epoch}"


def join_group_request(group: Form) -> dict[str, Any]:
    """Enters a transfer group with all workers, which connect to each other, or will with the first bucket."""
    return {
        "master_address": group.host,
        "master_port": group.port,
        "rank_offset": group.rank,
        "world_size": group.world,
        "group_name": group_name(group),
        "backend": BACKEND,
    }


def leave_group_request(name: str) -> dict[str, Any]:
    """Leaves a transfer group."""
    return {"group_name": name}


def bucket_request(bucket: Sequence[TensorInfo], group: str, *, version: int | None = None) -> dict[str, Any]:
    """Receives the tensors of a bucket in one broadcast, and loads them; those of the last one make up `version`."""
    return {
        "names": [tensor.name for tensor in bucket],
        "dtypes": [tensor.dtype for tensor in bucket],
        "shapes": [tensor.shape for tensor in bucket],
        "group_name": group,
        "load_format": "flattened_bucket",
        "weight_version": None if version is None else str(version),
        "flush_cache": version is not None,
    }
