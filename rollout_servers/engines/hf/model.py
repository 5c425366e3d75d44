"""A causal language model of transformers: its forward pass, and its weights."""

import inspect
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from slipstream.buffer.wire.weights.protocol import Manifest
from slipstream.configs.models import without_remote_code
from slipstream.configs.schema import RunConfig
from slipstream.rollout_servers.engines.base import UpdateFailed, check_positions
from slipstream.rollout_servers.engines.hf_state_dict import saved_buffers, saved_form
from slipstream.rollout_servers.engines.staging import Staging

# B sequences, T tokens (those in the cache too), N of them new, V vocabulary


class Policy:
    """The model.

    Attributes:
        vocabulary: how many tokens it knows.
        device: where it computes.
        joins: whether the caches of two batches can be put together; the states of recurrent layers can't.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        """Loads it onto the GPU if there is one. `rollout.engine.options` go to `from_pretrained`.

        Raises: ConfigError when it is not made for `rollout.engine.max_model_len`; whatever transformers raises.
        """
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        options = {"dtype": self._dtype, "trust_remote_code": False, **config.rollout.engine.options}
        with without_remote_code(folder):
            model: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
        if "device_map" not in options:
            model.to("cuda" if torch.cuda.is_available() else "cpu")
        self._model = model.eval().requires_grad_(False)
        buffers = saved_buffers(model)
        for buffer in buffers.values():
            buffer.data = buffer.float()  # as they are in the learner, and published
        parameters = saved_form(model, dict(model.named_parameters()))
        self._held = {name: (parameter, self._dtype) for name, parameter in parameters.items()} | {
            name: (buffer, torch.float32) for name, buffer in saved_form(model, buffers).items()
        }
        self.device: torch.device = model.device
        text = model.config.get_text_config(decoder=True)
        self.vocabulary: int = text.vocab_size
        check_positions(config, text, folder)
        self._inputs = frozenset(inspect.signature(model.forward).parameters)
        self._attends = "past_key_values" in self._inputs
        self.joins = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in self.new_cache().layers)

    def new_cache(self) -> Cache:
        """An empty one, of the kinds of layers that the model needs."""
        return DynamicCache(config=self._model.config)

    def next_logits(self, ids_BN: Tensor, mask_BT: Tensor, cache: Cache) -> Tensor:
        """Logits of the token that follows, fp32, shape [B, V]; adds the new tokens to the cache.

        `mask_BT` is 0 on padding, which stands to the left of a sequence.
        """
        new = ids_BN.shape[1]
        inputs: dict[str, Any] = {
            "input_ids": ids_BN,
            # Without attention, only the new tokens are looked at, and the cache has another name.
            "attention_mask": mask_BT if self._attends else mask_BT[:, -new:],
            "position_ids": (mask_BT.cumsum(-1) - 1).clamp(min=0)[:, -new:],
            "use_cache": True,
            "logits_to_keep": 1,
            "past_key_values" if self._attends else "cache_params": cache,
        }
        known = {name: value for name, value in inputs.items() if name in self._inputs}
        logits: Tensor = self._model(**known).logits
        return logits[:, -1].float()

    def distributions(self, token_ids: list[int]) -> Tensor:
        """log-probs of every token behind each place, at temperature 1, without a cache; fp32, shape [T, V]."""
        ids = torch.tensor([token_ids], device=self.device)
        logits: Tensor = self._model(ids, use_cache=False).logits[0]
        return logits.float().log_softmax(-1)

    def score(self, token_ids: list[int]) -> list[float]:
        """log-prob of each token but the first, given those before it, at temperature 1."""
        following = torch.tensor(token_ids[1:], device=self.device)[:, None]
        logprobs: list[float] = self.distributions(token_ids)[:-1].gather(-1, following)[:, 0].tolist()
        return logprobs

    def install(self, manifest: Manifest, staging: Staging) -> None:
        """Copies a staged version into the model; what is tied to a parameter follows.

        Raises: UpdateFailed, with nothing touched, unless the version has each tensor once, in its shape and dtype.
        """
        if staging.version != manifest.version:
            raise UpdateFailed(f"version {manifest.version} is not staged: version {staging.version} is")
        wanted = {
            name: (list(tensor.shape), str(dtype).removeprefix("torch."))
            for name, (tensor, dtype) in self._held.items()
        }
        offered = {tensor.name: (tensor.shape, tensor.dtype) for tensor in manifest.tensors}
        for name in (*wanted, *offered):
            if wanted.get(name) != offered.get(name):
                raise UpdateFailed(
                    f"version {manifest.version} does not fit the model: of {name} it has "
                    f"{offered.get(name, 'nothing')}, the model has {wanted.get(name, 'nothing')}"
                )
        for name, tensor in staging.named_tensors(manifest):
            self._held[name][0].copy_(tensor)

    def checksums(self) -> dict[str, int]:
        """xxh3 (64 bits) of each tensor's bytes in the dtype in which it is published."""
        return {
            name: xxhash.xxh3_64_intdigest(
                tensor.to("cpu", dtype).contiguous().reshape(-1).view(torch.uint8).numpy().data
            )
            for name, (tensor, dtype) in self._held.items()
        }
