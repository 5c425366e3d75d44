"""The episode that rewards get."""

from dataclasses import replace
from typing import Any

import pytest

from slipstream.rewards.base import EpisodeTurn, text_of
from tests.rewards.episodes import episode


def test_an_episode_shows_its_dialogue_and_its_last_action() -> None:
    turns = (
        EpisodeTurn(text="look", tokens=2, end=5, observation="a door"),
        EpisodeTurn(text="open it", tokens=3, end=11),
    )
    subject = replace(episode(""), turns=turns, prompt=[{"role": "system", "content": "Play."}])
    assert (subject.answer, subject.tokens) == ("open it", 5)
    assert [(message["role"], message["content"]) for message in subject.messages] == [
        ("system", "Play."),
        ("assistant", "look"),
        ("user", "a door"),
        ("assistant", "open it"),
    ]
    assert replace(subject, prompt="Play.").messages[0] == {"role": "user", "content": "Play."}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("as it is", "as it is"),
        (None, ""),
        ([{"type": "image"}, {"type": "text", "text": "Which?"}], "<image>Which?"),
        ([{"type": "image_url", "image_url": {"url": "a.png"}}, "Which?"], "<image>Which?"),
        ([{"type": "text", "text": None}, {}], "<text><part>"),
    ],
)
def test_contents_as_text(content: Any, text: str) -> None:
    assert text_of(content) == text
