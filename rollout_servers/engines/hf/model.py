"""A causal language model of transformers: forward pass, weights, and the KV cache of a batch."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from slipstream.buffer.wire.weights.protocol import Manifest
from slipstream.configs.runtime.errors import ConfigError
from slipstream.models.adapters import adapter_tensor, require_peft
from slipstream.models.folder import without_remote_code
from slipstream.models.state_dict import published_buffers, saved_parts
from slipstream.rollout_servers.engines.base import EngineSettings, UpdateFailed, check_positions
from slipstream.rollout_servers.engines.staging import Staging

# B sequences, T tokens in the cache (padding on the left), N new tokens, V vocabulary


class HfModel:
    """The model.

    Attributes:
        vocabulary: number of token ids.
        device: of inputs and outputs.
        joins: whether the caches of two batches can be concatenated; the states of recurrent layers can't.
    """

    def __init__(self, settings: EngineSettings) -> None:
        """Loads the model onto the GPU if there is one. `rollout.engine.options` go to `from_pretrained`, but
        `gpu_memory_utilization`, the share of the GPU's memory that PyTorch may take.

        Raises: ConfigError when it has too few positions for `rollout.engine.max_model_len`; what transformers raises.
        """
        self._dtype: torch.dtype = getattr(torch, settings.config.model.dtype_here)
        options = {"dtype": self._dtype, "trust_remote_code": False, **settings.config.rollout.engine.options}
        share = options.pop("gpu_memory_utilization", None)
        if share is not None and torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(float(share))
        with without_remote_code(settings.model):
            model: Any = AutoModelForCausalLM.from_pretrained(settings.model, **options)
        if "device_map" not in options:
            model.to("cuda" if torch.cuda.is_available() else "cpu")
        self._model = model.eval().requires_grad_(False)
        self._adapter: dict[str, Any] | None = None
        if settings.config.model.lora is not None:
            require_peft()
        buffers = published_buffers(model)
        for buffer in buffers.values():
            buffer.data = buffer.float()  # their dtype in the learner and in a manifest
        parameters = saved_parts(model, dict(model.named_parameters()))
        self._held = {name: (parameter, self._dtype) for name, parameter in parameters.items()} | {
            name: (buffer, torch.float32) for name, buffer in saved_parts(model, buffers).items()
        }
        self.device: torch.device = model.device
        text = model.config.get_text_config(decoder=True)
        if getattr(text, "attn_logit_softcapping", None) is not None:
            model.set_attn_implementation("eager")  # torch's attention would ignore the soft cap
        self.vocabulary: int = text.vocab_size
        check_positions(settings.config.rollout.engine.max_model_len, text, settings.model)
        self._inputs = frozenset(inspect.signature(model.forward).parameters)
        self._attends = "past_key_values" in self._inputs
        self.joins = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in self.new_cache().layers)

    def new_cache(self) -> Cache:
        """An empty cache with the kinds of layers that the model needs."""
        return DynamicCache(config=self._model.config)

    def next_logits(self, ids_BN: Tensor, mask_BT: Tensor, cache: Cache) -> Tensor:
        """Logits of the token that follows, fp32, shape [B, V]; adds the new tokens to the cache.

        `mask_BT` is 0 on padding, which stands to the left of a sequence.
        """
        new = ids_BN.shape[1]
        inputs: dict[str, Any] = {
            "input_ids": ids_BN,
            # Models without attention take the mask of new tokens only, and name the cache differently.
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
        """log-probs of the token after each position, at temperature 1, without a cache; fp32, shape [T, V]."""
        ids = torch.tensor([token_ids], device=self.device)
        logits: Tensor = self._model(ids, use_cache=False).logits[0]
        return logits.float().log_softmax(-1)

    def score(self, token_ids: list[int]) -> list[float]:
        """log-prob of each token but the first, given those before it, at temperature 1."""
        following = torch.tensor(token_ids[1:], device=self.device)[:, None]
        logprobs: list[float] = self.distributions(token_ids)[:-1].gather(-1, following)[:, 0].tolist()
        return logprobs

    def install(self, manifest: Manifest, staging: Staging) -> None:
        """Copies a staged version into the model; tied parameters follow.

        Raises: UpdateFailed, with the model unchanged, unless the version has each tensor once, in shape and dtype.
        """
        if staging.version != manifest.version:
            raise UpdateFailed(f"version {manifest.version} is not staged: version {staging.version} is")
        if manifest.adapter is not None and manifest.adapter != self._adapter:
            self._add_adapter(manifest.adapter)
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
            self._held[name][0].copy_(tensor, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # before the staging memory is written again

    def _add_adapter(self, config: dict[str, Any]) -> None:
        """Adds an adapter without effect, which is all that versions change from now on. Raises: UpdateFailed."""
        if self._adapter is not None:
            raise UpdateFailed(f"a version has another adapter than those before: {config}")
        import peft

        decoder = getattr(self._model, "model", self._model.base_model).get_decoder()
        peft.inject_adapter_in_model(peft.get_peft_config(config), decoder)
        self._adapter = config
        self._held = {
            saved_as: (parameter.requires_grad_(False), self._dtype)
            for name, parameter in self._model.named_parameters()
            if (saved_as := adapter_tensor(name)) is not None
        }

    def checksums(self) -> dict[str, int]:
        """xxh3 (64 bits) of each tensor's bytes in the dtype in which it is published."""
        return {
            name: xxhash.xxh3_64_intdigest(
                tensor.to("cpu", dtype).contiguous().reshape(-1).view(torch.uint8).numpy().data
            )
            for name, (tensor, dtype) in self._held.items()
        }


class Batch:
    """The KV cache of B sequences."""

    def __init__(self, policy: HfModel, cache: Cache, mask_BT: Tensor) -> None:
        self._policy = policy
        self._cache: Any = cache  # its layers are of many kinds
        self._mask_BT = mask_BT

    @classmethod
    def of(cls, policy: HfModel, sequences: Sequence[Sequence[int]]) -> tuple["Batch", Tensor]:
        """The cache of these sequences and the next tokens' logits, shape [B, V]; equal sequences are computed once."""
        places: dict[tuple[int, ...], int] = {}
        place_B = [places.setdefault(tuple(sequence), len(places)) for sequence in sequences]
        longest = max(map(len, places))
        ids = [[0] * (longest - len(each)) + list(each) for each in places]
        mask = [[0] * (longest - len(each)) + [1] * len(each) for each in places]
        cache, mask_BT = policy.new_cache(), torch.tensor(mask, device=policy.device)
        logits_BV = policy.next_logits(torch.tensor(ids, device=policy.device), mask_BT, cache)
        batch = cls(policy, cache, mask_BT)
        if len(places) < len(place_B):
            index_B = torch.tensor(place_B, device=policy.device)
            batch._reorder(index_B)
            logits_BV = logits_BV[index_B]
        return batch, logits_BV

    def advance(self, token_ids: Sequence[int]) -> Tensor:
        """Adds a token to each sequence; logits of the next, shape [B, V]."""
        ids_B1 = torch.tensor(token_ids, device=self._policy.device)[:, None]
        self._mask_BT = pad(self._mask_BT, (0, 1), value=1)
        return self._policy.next_logits(ids_B1, self._mask_BT, self._cache)

    def join(self, other: "Batch") -> None:
        """Appends the sequences of another batch; only where `policy.joins`."""
        length = max(self._mask_BT.shape[1], other._mask_BT.shape[1])
        self._resize(length)
        other._resize(length)
        self._mask_BT = torch.cat([self._mask_BT, other._mask_BT])
        for mine, others in zip(self._cache.layers, other._cache.layers, strict=True):
            mine.keys = torch.cat([mine.keys, others.keys])
            mine.values = torch.cat([mine.values, others.values])

    def keep(self, places: Sequence[int]) -> None:
        """Drops all sequences but these, and superfluous padding."""
        self._reorder(torch.tensor(places, device=self._policy.device))
        if self._policy.joins:
            self._resize(int(self._mask_BT.sum(-1).max()))

    def _reorder(self, index_B: Tensor) -> None:
        self._cache.reorder_cache(index_B)
        self._mask_BT = self._mask_BT[index_B]

    def _resize(self, length: int) -> None:
        """Adds or removes padding on the left, to T = `length`; a negative pad removes."""
        self._mask_BT = pad(self._mask_BT, (length - self._mask_BT.shape[1], 0))
        for layer in self._cache.layers:
            kept = length
            if isinstance(layer, DynamicSlidingWindowLayer):
                kept = min(length, layer.sliding_window - 1)
                layer.cumulative_length = length
            more = kept - layer.keys.shape[-2]
            layer.keys = pad(layer.keys, (0, 0, more, 0))
            layer.values = pad(layer.values, (0, 0, more, 0))


TOLERANCE = {"float32": 1e-2, "bfloat16": 0.1}
"""Mean |Δ| of log-probs: more than rounding causes, less than padding that is not masked."""

_LONG, _SHORT = 12, 5  # tokens


def check_padding(policy: HfModel, *, dtype: str) -> None:
    """Compares log-probs of two sequences of different lengths with those without padding and cache.

    Raises: ConfigError when they differ by more than `TOLERANCE`.
    """
    sequences = [[place % policy.vocabulary for place in range(3, 3 + length)] for length in (_LONG, _SHORT)]
    batch, first_BV = Batch.of(policy, sequences)
    next_tokens = first_BV.argmax(-1).tolist()
    found_B2V = torch.stack([first_BV, batch.advance(next_tokens)], dim=1).log_softmax(-1)
    expected_B2V = torch.stack(
        [policy.distributions([*each, token])[-2:] for each, token in zip(sequences, next_tokens, strict=True)]
    )
    off = (found_B2V - expected_B2V).abs().mean().item()
    if not off <= TOLERANCE[dtype]:  # NaN neither
        raise ConfigError(
            f"the model's log-probs are off by {off:.2g} when it runs in a padded batch, so "
            "rollout.engine.name=hf can't serve it; choose another engine"
        )
