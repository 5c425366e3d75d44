"""Did every training step have as many groups as it should? What no group by itself can tell. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_PROBLEMS = 1000


@dataclass(frozen=True)
class StepTally:
    """What one shard of the ledger remembers of the steps."""

    forgotten_step: int
    """The last step of which groups were forgotten, -1 without any."""
    groups: Mapping[int, int]
    """By step."""


@dataclass(frozen=True)
class StepCheck:
    """The steps against `learner.groups_per_step`."""

    problems: list[str]
    """One sentence each, at most MOST_PROBLEMS."""
    forgotten_step: int
    """Steps up to this one could not be checked, since groups of theirs were forgotten; -1: all were."""


def check_steps(shards: Sequence[StepTally], *, groups_per_step: int) -> StepCheck:
    """Each shard gives the same number of groups to each step, from the first that is wholly remembered to the last.

    A shard may be one step behind the others, for they hear of a step one after the other.
    """
    share = groups_per_step // len(shards)
    last = max((step for tally in shards for step in tally.groups), default=-1)
    problems: list[str] = []
    for shard, tally in enumerate(shards):
        where = f" in shard {shard}" if len(shards) > 1 else ""
        due = f"learner.groups_per_step={groups_per_step}" + (f", {share} of them in each shard" if where else "")
        for step in range(tally.forgotten_step + 1, max([last - 1, *tally.groups]) + 1):
            found = tally.groups.get(step, 0)
            if len(problems) == MOST_PROBLEMS:
                break
            if found != share:
                problems.append(f"step {step} was trained on {found} groups{where}, but {due}")
    return StepCheck(problems, max(tally.forgotten_step for tally in shards))
