"""At whom a broadcast broke off, and whom the next one goes to. No sockets here.

Who is singled out fetches the next 1, 2, 4, ... versions, twice as many with each broadcast in a row that breaks off
at it; then it is tried again. Where several may be at fault, half of them fetch until the others have come through.
"""

from collections.abc import Collection, Sequence

from slipstream.configs.logs import get_log
from slipstream.learner.weights.members import Member

log = get_log("learner.weights")

CHECK = "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME there, firewalls between it, the learner and the other servers"


def admitted(members: Sequence[Member], version: int) -> list[Member]:
    """Those of the members that a version may be broadcast to; the others fetch it."""
    willing = [member for member in members if member.record.broadcast_from <= version]
    doubtful = sorted(
        (member for member in willing if member.suspects), key=lambda member: (member.record.breaks, member.suspects)
    )
    put_off = doubtful[max(1, doubtful[0].suspects // 2) :] if doubtful else []
    return [member for member in willing if member not in put_off]


def came_through(members: Sequence[Member]) -> None:
    """A broadcast reached all of them."""
    for member in members:
        if member.record.breaks:
            log.info("broadcasts reach a rollout server again", server=member.name)
        member.proven, member.suspects, member.record.breaks = True, 0, 0


def broke_off(members: Sequence[Member], done: Collection[Member], next_version: int, reason: str) -> None:
    """Finds out who of the members is at fault.

    Args:
        done: who did its part of the step at which the broadcast broke off; the others may also be victims of one.
        next_version: the first that is broadcast again.
    """
    not_done = [member for member in members if member not in done]
    # Who was reached before is rather the victim of one that never was.
    suspects = [member for member in not_done if not member.proven] or not_done
    for member in suspects:
        member.proven, member.suspects = False, len(suspects)
    if len(suspects) == 1:
        at_fault(suspects[0], next_version, reason)


def at_fault(member: Member, next_version: int, reason: str) -> None:
    """A broadcast broke off at this member: it fetches for a while, from `next_version` on."""
    record = member.record
    record.breaks += 1
    record.broadcast_from = next_version + 2 ** (record.breaks - 1)
    if record.breaks == 1:
        log.warning(
            "broadcasts don't reach a rollout server: it fetches its weights instead",
            server=member.name,
            reason=reason,
            tried_again_at_version=record.broadcast_from,
            check=CHECK,
        )
