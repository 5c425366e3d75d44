"""What the buffer service, rollout servers and learner say to each other over ZeroMQ; about weights see `weights.py`.

Arrays travel as raw little-endian bytes; the `*_DTYPE` constants name their element types. Every message is a map of
named fields with a `type` and the schema version `v`, so that a field can be added without shifting another.
"""

import secrets
from typing import Annotated, Final

import msgspec

SCHEMA_VERSION: Final = 8

TOKEN_DTYPE: Final = "<i4"
LOGPROB_DTYPE: Final = "<f4"
MASK_DTYPE: Final = "u1"

TRAIN: Final = "train"
EVAL: Final = "eval"

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""A number that becomes arithmetic in Redis: its scripts calculate with doubles and loop over what is granted."""

Tasks = Annotated[int, msgspec.Meta(ge=0, lt=10**8 + 1)]
"""As many as an env may have: the service shuffles the indices of an epoch in its memory."""

GroupId = Annotated[str, msgspec.Meta(max_length=64)]
"""A number, or `e<version>-<task>` and `e<version>-<task>-<times>`; bounded like all that a peer may make the service
remember."""
Name = Annotated[str, msgspec.Meta(max_length=1024)]
Incarnation = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
"""Of a process: another one at every start."""
DETAIL_CHARACTERS: Final = 4096
Detail = Annotated[str, msgspec.Meta(max_length=DETAIL_CHARACTERS)]
"""Words for a person to read; whoever sends them cuts them to size."""
Settings = Annotated[dict[Name, Detail], msgspec.Meta(max_length=64)]
"""Values of configuration keys that the sender and the service must agree on; what it doesn't name is not compared."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
GROUPS_PER_DELIVERY: Final = 4095
AGAIN: Final = "again"
MOST_REWARD: Final = 1e15
"""By its size: sums of squares of many must be finite in the learner's float32, and sums in Redis."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Root of all messages."""

    v: int = SCHEMA_VERSION


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Root of what messages contain."""


# --- what travels ------------------------------------------------------------------------------------------------


class Ticket(Record, frozen=True):
    """The buffer's permission to generate one group."""

    id: str
    kind: str
    """`train`, or `eval`: greedy, one answer per task, pinned to `version`, never trained on."""
    epoch: int
    indices: list[int]
    """Task indices: one for `train`, a slice of the held-out tasks for `eval`."""
    samples: int
    """Answers per task."""
    version: int
    """The server's policy version at issue."""
    greedy: bool = False
    """Of `train`: also one greedy answer, whose reward is the group's baseline."""


class VersionSpan(Record, frozen=True):
    """Tokens [start, end) of a trajectory came from this policy version, as the engine stamped them."""

    version: int
    start: int
    end: int


class RewardSpan(Record, frozen=True):
    """A reward that an episode's turn earned, credited at the token before `end` (exclusive end of the turn)."""

    end: Annotated[int, msgspec.Meta(ge=1)]
    value: float


class Trajectory(Record, frozen=True):
    """One token sequence of an episode; arrays have one element per token, context and actions, in order.

    An episode leaves one trajectory, or several where its token prefix breaks; these share reward and scores.
    """

    token_ids: bytes
    action_mask: bytes
    """1 where the policy chose the token."""
    behaviour_logprobs: bytes
    """log μ of the tokens that the policy chose, 0 elsewhere; finite."""
    spans: list[VersionSpan]
    reward: float
    """Total reward of the episode."""
    scores: dict[str, float]
    """Each reward term before weighting."""
    finish_reason: str
    episode: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    """Index of the episode within its group."""
    rewards: list[RewardSpan] = []
    """Rewards of single turns, in the order of their ends; empty: the reward arrives with the last action."""


class Group(Message, frozen=True):
    """The trajectories of one ticket; stored in Redis byte for byte as it was sent."""

    id: GroupId
    kind: Name
    epoch: int
    indices: list[int]
    trajectories: list[Trajectory]
    missing: Count = 0
    """Episodes not finished at the group's deadline, or held-out tasks that can't be answered; it goes without them."""
    greedy_reward: float | None = None
    """Of a ticket that asked for it: the reward of a greedy answer, which itself is not trained on."""


class ServerStatus(Record, frozen=True):
    """Counters of a rollout server since its start."""

    server: Name = ""
    version: int = 0
    tokens_generated: int = 0
    busy_s: float = 0.0
    """Time with at least one running episode."""
    up_s: float = 0.0
    """Time since the engine was ready."""
    engine_deaths: int = 0
    """How often its engine was started anew."""
    requests_restarted: int = 0
    """Requests that a death of the engine sent back to their first token."""


class LedgerCounts(Record, frozen=True):
    """Groups by state: issued = in_flight + ready + leased + trained + filtered + expired + reissued."""

    issued: int = 0
    in_flight: int = 0
    ready: int = 0
    leased: int = 0
    trained: int = 0
    """Trained, whether a checkpoint contains the step already or not."""
    durable: int = 0
    """Those of `trained` that a saved checkpoint contains."""
    filtered: int = 0
    expired: int = 0
    reissued: int = 0
    uses: int = 0
    """Uses in training steps: more than `trained` when a group may be used several times."""
    tokens: int = 0
    """Action tokens of all groups that were delivered."""
    answers_dropped: dict[str, int] = {}
    """Answers that never reach a training step, by reason: of dropped groups, and left out by filters."""
    reasons: dict[str, int] = {}
    """`filtered:<reason>` and `expired:<reason>`."""
    dropped_frames: int = 0
    """Malformed messages since the service started."""


class EvalReport(Record, frozen=True):
    """A finished evaluation."""

    version: int
    score: float
    """Mean over the tasks that were answered; 0 if none was."""
    tasks: int
    """That were answered."""
    failed: int
    """Tasks that nobody could answer."""
    eval_s: float
    group_ids: list[str]


# --- rollout server and buffer -------------------------------------------------------------------------------------


class ServerHello(Message, frozen=True):
    """A rollout server introduces itself; what doesn't match the run is refused."""

    run: Name
    env: Name
    env_fingerprint: Name
    train_tasks: Tasks
    eval_tasks: Tasks
    tokenizer_fingerprint: Name
    incarnation: Incarnation
    """The tickets of an earlier one under the same name are lost."""
    settings: Settings = {}


class ServerGoodbye(Message, frozen=True):
    """A rollout server ends: what it was granted and has not delivered is for others."""

    incarnation: Incarnation
    """Of the hello: late, it must not take anything from a successor of that name."""


class Welcome(Message, frozen=True):
    """The service accepts a peer; `version` is the latest published policy version."""

    version: int


class Refused(Message, frozen=True):
    """The service refuses a request or a peer."""

    reason: str
    request: int = 0


class UnknownPeer(Message, frozen=True):
    """The service does not know this peer (it was restarted, or Redis has lost the hello): say hello again."""

    request: int = 0


class Credits(Message, frozen=True):
    """Heartbeat of a rollout server, sent on every change too: how many tickets it can hold, and how it does."""

    capacity: Annotated[int, msgspec.Meta(ge=0, lt=1_000_000)]
    status: ServerStatus
    held: Annotated[list[GroupId], msgspec.Meta(max_length=1_000_000)]
    """Ids of the tickets that it plays or has answers for; others that it was sent have got lost on the way."""


class Tickets(Message, frozen=True):
    """Granted tickets."""

    tickets: list[Ticket]
    grant: Name = msgspec.field(default_factory=lambda: secrets.token_hex(8))
    """Another one each time: when Redis has lost the end of its file, new tickets have the ids of lost ones."""


class EvalDrained(Message, frozen=True):
    """No evaluation ticket of this version is left to hand out: the server may go on to newer weights."""

    version: int


class Deliver(Message, frozen=True):
    """Groups follow, one frame each, in this order."""

    ids: Annotated[list[GroupId], msgspec.Meta(max_length=GROUPS_PER_DELIVERY)]


class GroupFailed(Message, frozen=True):
    """A ticket came to nothing; the group is counted as filtered with this reason."""

    id: GroupId
    kind: Name
    """The ticket's kind."""
    reason: Name
    detail: Detail
    tokens: Count = 0


class Acknowledge(Message, frozen=True):
    """The service has stored, refused as duplicate, or counted these; the sender may forget all but what is `again`."""

    outcomes: dict[str, str]
    """Id → `ready`, `filtered`, `evaluated`, `duplicate`, `void` (the ticket had expired), `finished` (the run is
    over), or `again`: it came damaged or was lost, and is to be sent once more."""


# --- learner and buffer: a run has one learner, the one that said hello last; others are refused -------------------


class LearnerHello(Message, frozen=True):
    """A learner starts at `step` done steps; groups trained after that step are given back."""

    request: int
    incarnation: Incarnation
    run: Name
    step: Count
    model_fingerprint: Name = ""
    """Of the model that the run starts from; what doesn't match the run is refused. Empty: not told."""
    settings: Settings = {}


class LeaseRequest(Message, frozen=True):
    """The learner asks for `count` groups that it will consume at `consuming_version`."""

    request: int
    incarnation: Incarnation
    step: Count
    count: Count
    consuming_version: Count
    wait_s: Seconds


class Lease(Message, frozen=True):
    """The leased groups, to be read from Redis."""

    request: int
    group_ids: list[str]
    importance_weights: list[float]
    """How much each group counts: 1, or the importance weight of its selection (prioritized sampling)."""


class NotReady(Message, frozen=True):
    """Too few groups were ready within `wait_s`."""

    request: int


class Trained(Message, frozen=True):
    """The groups leased for `step` went into an optimizer step."""

    request: int
    incarnation: Incarnation
    step: Count


class Published(Message, frozen=True):
    """The learner's weights are now `version`; `evaluate` asks for a greedy evaluation of it."""

    request: int
    incarnation: Incarnation
    version: Count
    evaluate: bool


class Throttle(Message, frozen=True):
    """The staleness that training can bear at present; what it exceeds `buffer.max_staleness` by has no effect."""

    request: int
    incarnation: Incarnation
    max_staleness: Count


class Checkpointed(Message, frozen=True):
    """A checkpoint that contains the first `step` steps is on disk."""

    request: int
    incarnation: Incarnation
    step: Count


class Finish(Message, frozen=True):
    """The run is over: nothing more is issued, and what is in flight expires."""

    request: int
    incarnation: Incarnation


class StateRequest(Message, frozen=True):
    """Asks for the state of the buffer and of its servers."""

    request: int


class State(Message, frozen=True):
    """Answer to every learner request but a lease."""

    request: int
    version: int
    counts: LedgerCounts
    servers: list[ServerStatus]
    evals: list[EvalReport]
    """The latest finished evaluations."""
    length_bias: dict[str, float] = {}
    """Kolmogorov-Smirnov distance of the lengths of trained and of dropped (`<reason>`) answers from all delivered."""
    tasks: dict[str, int] = {}
    """Tasks by the outcome of their latest group: `solved`, `unsolved` or `mixed` (filter `dynamic_sampling`)."""


ToService = (
    ServerHello
    | ServerGoodbye
    | Credits
    | Deliver
    | GroupFailed
    | LearnerHello
    | LeaseRequest
    | Trained
    | Published
    | Throttle
    | Checkpointed
    | Finish
    | StateRequest
)
ToServer = Welcome | Refused | UnknownPeer | Tickets | EvalDrained | Acknowledge
ToLearner = Refused | UnknownPeer | Lease | NotReady | State
