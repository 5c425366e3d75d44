"""Trajectories as text: their tokens decoded, and cut where the policy's actions begin and end."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from slipstream.buffer.wire.codec import action_mask, token_ids
from slipstream.buffer.wire.messages import Trajectory
from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.schema.model import ModelConfig
from slipstream.models.folder import Decode, model_folder, text_decoder
from slipstream.tools.cli import printable

SHOWN_CHARACTERS: Final = 4000
"""Characters that are shown of one stretch of text."""
LONGEST_CHARACTER: Final = 8
"""Most tokens of one character; what is still no character then is shown as it is."""


@dataclass(frozen=True)
class Stretch:
    """Tokens of a trajectory that belong together.

    Attributes:
        role: `prompt`, `action` (mask 1) or `observation` (mask 0).
        start: index of its first token.
        end: index after its last token.
        versions: policy versions of its tokens.
    """

    role: str
    start: int
    end: int
    versions: Sequence[int]
    text: str


def run_decoder(folder: RunPaths, model: ModelConfig) -> Decode:
    """Decodes with the tokenizer of a run. Raises: SlipstreamError when its model can't be found, or has none."""
    if model.path is None:
        return text_decoder(folder.initial_model)
    return text_decoder(model_folder("model.path", model.path, model.revision))


def decoder_or_reason(folder: RunPaths, model: ModelConfig) -> tuple[Decode | None, str]:
    """The decoder of a run, or None and why there is none."""
    try:
        return run_decoder(folder, model), ""
    except SlipstreamError as error:
        return None, str(error)


def stretches(trajectory: Trajectory, decode: Decode) -> list[Stretch]:
    """The trajectory's prompt, actions and observations in order."""
    ids, mask = token_ids(trajectory), action_mask(trajectory)
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    parts = []
    for start, end in pairwise(edges):
        role = "action" if mask[start] else "observation" if start else "prompt"
        versions = [span.version for span in trajectory.spans if span.start < end and span.end > start]
        parts.append(Stretch(role, start, end, sorted(set(versions)), decode(ids[start:end].tolist())))
    return parts


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """The text of each token, so that all together are the text of the whole.

    A character of several tokens belongs to the last of them. Each is decoded with those before it: alone, some
    tokenizers leave out a token's leading space.
    """
    texts = []
    start = read = 0
    for end in range(1, len(ids) + 1):
        before, whole = decode(ids[start:read]), decode(ids[start:end])
        is_whole = len(whole) > len(before) and not whole.endswith("\N{REPLACEMENT CHARACTER}")
        if is_whole or end == len(ids) or end - read > LONGEST_CHARACTER:
            texts.append(whole[len(before) :])
            start, read = read, end
        else:
            texts.append("")
    return texts


def text_of(trajectory: Trajectory, decode: Decode) -> str:
    """The trajectory as text: a line for each stretch and its content below, indented."""
    lines = []
    for stretch in stretches(trajectory, decode):
        versions = f", version {', '.join(map(str, stretch.versions))}" if stretch.versions else ""
        lines.append(f"{stretch.role} ({stretch.end - stretch.start:,} tokens{versions})")
        left_out = len(stretch.text) - SHOWN_CHARACTERS
        text = stretch.text[:SHOWN_CHARACTERS] + (f"… ({left_out:,} characters more)" if left_out > 0 else "")
        lines += [f"  | {printable(line)}" for line in text.split("\n")]
    return "\n".join(lines)
