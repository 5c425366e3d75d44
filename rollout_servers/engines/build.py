"""Starts the engine that the configuration asks for."""

from pathlib import Path

from slipstream.configs.errors import ConfigError
from slipstream.configs.schema import RunConfig
from slipstream.rollout_servers.engines.base import Engine
from slipstream.rollout_servers.engines.vllm.arguments import (
    Generation,
    engine_arguments,
    has_gpu,
    prepare_environment,
)


async def start_engine(config: RunConfig, model: Path, *, eos_token_ids: tuple[int, ...]) -> Engine:
    """The running engine, with the weights of `model` as version 0.

    Raises: ConfigError when core and transport don't fit, EngineError when it does not start in
    `rollout.engine.start_deadline_s`.
    """
    gpu = has_gpu()
    prepare_environment(gpu=gpu)
    transport = config.weights.transport
    if transport == "auto":
        transport = "nccl" if gpu else "gloo"
    if transport == "nccl" and config.rollout.engine.core == "inline":
        raise ConfigError(
            "rollout.engine.core=inline receives weights through gloo only; "
            "set rollout.engine.core=process, or weights.transport=gloo"
        )
    sampling = config.rollout.sampling
    generation = Generation(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=() if sampling.ignore_eos else eos_token_ids,
    )
    arguments = engine_arguments(config, model, transport=transport, gpu=gpu)
    bucket_bytes = config.weights.bucket_bytes
    deadline_s = config.rollout.engine.start_deadline_s
    # Imported here: vLLM reads its environment at import, and takes seconds.
    if config.rollout.engine.core == "inline":
        from slipstream.rollout_servers.engines.vllm.inline import InlineEngine

        return await InlineEngine.start(arguments, generation, bucket_bytes=bucket_bytes, deadline_s=deadline_s)
    from slipstream.rollout_servers.engines.vllm.process import ProcessEngine

    return await ProcessEngine.start(arguments, generation, bucket_bytes=bucket_bytes, deadline_s=deadline_s)
