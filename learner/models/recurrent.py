"""Layers with a state, such as linear attention and short convolutions, run on each packed sequence alone.

# N packed tokens, B sequences of nearly one length, L tokens of the longest, D hidden size
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_BOUNDARIES = {
    "segment_lengths", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "padding_tokens",
    "tree",
}  # fmt: skip
_PADDING = 1.25
"""Sequences are padded to a batch while the longest has at most so many times the tokens of each other."""


def separate_sequences(decoder: Any) -> None:
    """Makes the layers of a transformers model that have a state start anew at each packed sequence; exact.

    They are those with a convolution over the tokens, by which all recurrent mixers of transformers but a few begin;
    the packing check finds the others. transformers' own handling of boundaries needs kernels for GPUs.
    """
    for layer in decoder.layers:
        for module in layer.modules():
            if any(isinstance(child, nn.Conv1d) for child in module.children()):
                mixer = _Mixer(module.forward)
                # The layer is called with the boundaries, but not each passes them on.
                layer.register_forward_pre_hook(partial(_set_boundaries, mixer), with_kwargs=True)
                module.forward = mixer


class _Mixer:
    """The forward pass of a causal layer with a state."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self.segment_lengths: Sequence[int] = ()

    def __call__(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Output of each packed sequence alone. `hidden_states` and output: [1, N, D]."""
        options = {name: value for name, value in options.items() if name not in _BOUNDARIES}
        outputs = []
        sequences = hidden_states[0].split(list(self.segment_lengths))
        for batch in _batches(sequences):
            # The layer is causal: padding behind a sequence changes nothing before it.
            states_BLD = nn.utils.rnn.pad_sequence(batch, batch_first=True)
            out_BLD = self._forward(states_BLD, *arguments, **options)
            outputs += [out[: len(sequence)] for out, sequence in zip(out_BLD, batch, strict=True)]
        return torch.cat(outputs).unsqueeze(0)


def _set_boundaries(mixer: _Mixer, _layer: nn.Module, _inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
    mixer.segment_lengths = options["segment_lengths"]


def _batches(sequences: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive sequences whose lengths differ little; packing puts the longest first."""
    batch: list[Tensor] = []
    for sequence in sequences:
        lengths = [len(tokens) for tokens in (*batch, sequence)]
        if max(lengths) > _PADDING * min(lengths):
            yield batch
            batch = []
        batch.append(sequence)
    yield batch
