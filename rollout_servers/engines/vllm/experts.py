"""Experts that vLLM chose for each token, returned with the answers.

On a GPU vLLM does this itself (`enable_return_routed_experts`), in its Model Runner V2, which needs triton. On a CPU it
has only the older runner: here that runner gets the part of V2 that records and returns them.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import PendingAuxOutput, get_aux_output_connector
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCaptureSource
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from slipstream.rollout_servers.engines.base import ExpertReader


def _skip_check(config: VllmConfig) -> None:
    """Instead of vLLM's check, which requires Model Runner V2. What else it checks is given here."""


if not torch.accelerator.is_available():
    # In the server and in the process of an engine core, which checks its configuration again.
    setattr(VllmConfig, "_verify_aux_output_compatibility", _skip_check)  # noqa: B010  (a method can't be assigned)


def expert_layers(model: Any) -> list[int]:
    """Numbers of the layers that have experts."""
    sources = (module for module in model.modules() if isinstance(module, MoERunner | RoutedExpertsCaptureSource))
    return sorted({source.layer_id for source in sources})


def record_experts(runner: Any, config: VllmConfig) -> None:
    """Makes the model runner of a CPU worker return the experts of each step, as Model Runner V2 does.

    vLLM's own connector maps the rows of a step to requests, keeps those of a prompt's chunks until its answer begins,
    and those of shared prefixes with their blocks of the KV cache.
    """
    connector = get_aux_output_connector(runner.get_model(), config, runner.kv_cache_config)
    execute_model, sample_tokens = runner.execute_model, runner.sample_tokens
    pending: PendingAuxOutput | None = None

    def execute(scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal pending
        connector.begin_step(scheduler_output.aux_output_connector_metadata)
        result = execute_model(scheduler_output, *arguments, **named)
        if result is None:  # the step had tokens, and `sample` follows
            pending = connector.prepare_output(_step_of(runner.input_batch, scheduler_output))
        return result

    def sample(*arguments: Any, **named: Any) -> Any:
        nonlocal pending
        output = sample_tokens(*arguments, **named)
        if pending is not None:
            sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = pending.process_output()
            pending = None
        return output

    runner.execute_model, runner.sample_tokens = execute, sample


def _step_of(batch: Any, scheduler_output: Any) -> Any:
    """The fields of a step's batch that the connector reads."""
    scheduled = [scheduler_output.num_scheduled_tokens[request] for request in batch.req_ids]
    return SimpleNamespace(
        req_ids=batch.req_ids,
        query_start_loc_np=np.cumsum([0, *scheduled]),
        num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(scheduled)].copy(),
    )


def reader_of(model_config: Any, layers: Sequence[int]) -> ExpertReader:
    """The reader of vLLM's answers. Raises: ConfigError when the model has no experts.

    Args:
        layers: numbers of those that have experts.
    """
    return ExpertReader.of(layers, model_config.get_num_experts_per_tok(), model_config.get_num_experts())
