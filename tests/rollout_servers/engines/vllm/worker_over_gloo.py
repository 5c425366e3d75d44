"""Our part of vLLM's workers with gloo in NCCL's place; vLLM imports it in the workers' processes."""

from slipstream.rollout_servers.engines.vllm.worker import StagedWorker
from tests.rollout_servers.engines.vllm.over_gloo import put_in_nccls_place

__all__ = ["StagedWorker"]

put_in_nccls_place(setattr)
