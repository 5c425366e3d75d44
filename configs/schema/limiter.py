"""The rate limit of the buffer: how often groups may be used."""

from fractions import Fraction

from pydantic import Field

from slipstream.configs.schema.base import Section


class LimiterConfig(Section):
    """How often groups may be used (Reverb's SampleToInsertRatio, arXiv 2102.04736)."""

    max_uses: int = Field(default=1, ge=1)
    """Training steps that one group may be used in."""
    samples_per_insert: float | None = Field(default=None, gt=0)
    """Uses per inserted group that leases are held to, over the groups that are there; unset: no such limit."""
    tolerance: float = Field(default=0.0, ge=0)
    """Uses by which leases may run ahead of, or insertions ahead of, `samples_per_insert`."""
    min_ready: int = Field(default=0, ge=0)
    """Nothing is leased until this many groups have been inserted."""

    def problems(self, *, groups_per_step: int, shards: int) -> list[str]:
        """What about these settings would stop leases and insertions for good, each shard having its share of them."""
        if self.samples_per_insert is None:
            return []
        problems = []
        if self.max_uses < self.samples_per_insert:
            problems.append(
                f"buffer.limiter.max_uses={self.max_uses} is less than "
                f"buffer.limiter.samples_per_insert={self.samples_per_insert:g}: the uses could never be had"
            )
        if self.min_ready % shards:
            problems.append(
                f"buffer.limiter.min_ready={self.min_ready} must be a multiple of buffer.shards={shards} if "
                "buffer.limiter.samples_per_insert is set"
            )
        least = shards * smallest_tolerance(
            samples_per_insert=self.samples_per_insert,
            groups_per_step=groups_per_step // shards,
            min_ready=self.min_ready // shards,
        )
        if self.tolerance < least:
            problems.append(
                f"buffer.limiter.tolerance={self.tolerance:g} lets leases and insertions block each other; "
                f"with these settings it must be at least {least:g}"
            )
        return problems


def smallest_tolerance(*, samples_per_insert: float, groups_per_step: int, min_ready: int = 0) -> float:
    """The tolerance, in uses, below which leases and insertions may come to block each other for good.

    Leases take whole steps of c = `groups_per_step`, insertions add s = `samples_per_insert`. Two things are needed:

    1. A step's groups must fit in before insertions stop: s · (c - min_ready) <= tolerance. That suffices later as
       well: when insertions stop, more than min_ready + tolerance/s - 1 groups are there, whatever their uses.
    2. No diff may stop both, as those between max_diff - s and min_diff + c do: from tolerance = (s + c)/2 on there are
       none. With s = n/q all diffs are multiples of 1/q (a group that leaves takes away s and a whole number of
       uses), so it may be rounded down to one.

    Reverb, which leases one at a time, asks for max(1, s); of c = 1 the second rule asks at most for (1 + s)/2.
    """
    to_fill_a_step = samples_per_insert * max(0, groups_per_step - min_ready)
    return max(to_fill_a_step, _to_always_move(samples_per_insert, groups_per_step))


def _to_always_move(samples_per_insert: float, groups_per_step: int) -> float:
    ratio = Fraction(samples_per_insert).limit_denominator(1_000_000)
    if float(ratio) != samples_per_insert:  # no ratio of a kind that a user writes: 1/q is next to nothing
        return (samples_per_insert + groups_per_step) / 2
    return float(Fraction((ratio + groups_per_step) * ratio.denominator // 2, ratio.denominator))
