"""Episodes of one action: a task's prompt and the policy's answer."""

from dataclasses import dataclass

from slipstream.env.base import Task
from slipstream.rewards.base import Episode, EpisodeTurn
from slipstream.rollout_servers.engines.base import Completion
from slipstream.rollout_servers.rollouts.base import Played, PlayedEpisode, Policy, Prompt, Transcript


@dataclass(frozen=True)
class SingleTurn:
    """All answers to a prompt are one request: engines share the prompt's KV cache."""

    policy: Policy

    async def play(self, task: Task, *, samples: int, greedy: bool, until: float) -> Played:
        """As the protocol `Rollout` has it. Raises: EpisodeFailed, EngineError."""
        prompt = self.policy.prompt(task.prompt, task.images)
        answers = await self.policy.generate(
            prompt.token_ids, images=prompt.images, samples=samples, greedy=greedy, until=until
        )
        finished = [answer for answer in answers if answer.finish_reason != "abort" and answer.token_ids]
        texts = self.policy.tokenizer.decode([answer.token_ids for answer in finished])
        return Played(
            [answered(task, prompt, answer, text) for answer, text in zip(finished, texts, strict=True)],
            lost_tokens=sum(len(answer.token_ids) for answer in answers if answer.finish_reason == "abort"),
        )


def answered(task: Task, prompt: Prompt, answer: Completion, text: str) -> PlayedEpisode:
    """The episode of a prompt and one answer, whose text is `text`."""
    transcript = Transcript.begin(prompt)
    transcript.add_action(answer)
    turn = EpisodeTurn(text=text, tokens=len(answer.token_ids), end=len(transcript.token_ids))
    view = Episode(
        prompt=task.prompt,
        reference=task.reference,
        info=task.info,
        turns=(turn,),
        prompt_tokens=len(prompt.token_ids),
        finish_reason=answer.finish_reason,
        ended="stop" if answer.finish_reason == "stop" else "length",
    )
    return PlayedEpisode([transcript], view)
