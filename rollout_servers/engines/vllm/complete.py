"""Makes sure that something came for every parameter of vLLM's model: vLLM keeps the old weights of the others."""

from typing import Any

from torch import nn
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

BACKEND = "slipstream_nccl"
"""The name under which vLLM's workers know `CompleteNccl`."""


class CompleteNccl(NCCLWeightTransferEngine):
    """vLLM's receiver of NCCL broadcasts, which does not look at what the model says that it has loaded."""

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receives a version. Raises: RuntimeError naming the parameters that no tensor came for."""
        model: Any = self.model
        load, loaded = model.load_weights, set[str]()

        def noted(tensors: Any) -> None:
            loaded.update(load(tensors))

        model.load_weights = noted
        try:
            super().receive_weights(update_info)
        finally:
            del model.load_weights  # the model's own, of its class, is there again
        check_complete(model, loaded, tied=is_tied(self.vllm_config))


def is_tied(vllm_config: Any) -> bool:
    """Whether the model's head is its embedding."""
    return bool(vllm_config.model_config.hf_text_config.tie_word_embeddings)


def check_complete(model: nn.Module, loaded: set[str], *, tied: bool) -> None:
    """Raises: RuntimeError naming the parameters that are not among those that were loaded, nor tied to one."""
    head = {"lm_head.weight"} if tied else set()
    missing = {name for name, _ in model.named_parameters()} - loaded - head
    if missing:
        raise RuntimeError(f"no weights came for {', '.join(sorted(missing))}")
