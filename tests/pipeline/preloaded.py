"""The imports of a run's processes, for one from which they are forked.

Nothing of it is garbage: a forked process that looked for some would walk through all of torch and vLLM, and copy it.
"""

import gc
from contextlib import suppress
from importlib import import_module

MODULES = [
    "torch",
    "transformers.models.qwen3.modeling_qwen3",
    "vllm.v1.engine.llm_engine",
    # These vLLM imports when an engine starts.
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "compressed_tensors",
    "slipstream.buffer.service",
    "slipstream.learner.trainers.rl.trainer",
    "slipstream.rollout_servers.engines.vllm.inline",
    "slipstream.rollout_servers.server",
]

gc.disable()
for module in MODULES:
    with suppress(ImportError):  # there may be no vLLM
        import_module(module)
gc.freeze()
gc.enable()
