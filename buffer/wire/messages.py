"""Messages between the buffer service, rollout servers and learner over ZeroMQ; for weights see `weights/protocol.py`.

Arrays travel as raw little-endian bytes; the `*_DTYPE` constants name their element types. Every message is a map of
named fields with a `type` and the schema version `v`, so that adding a field does not move others.
"""

import secrets
from typing import Annotated, Final

import msgspec

SCHEMA_VERSION: Final = 19

TOKEN_DTYPE: Final = "<i4"
LOGPROB_DTYPE: Final = "<f4"
MASK_DTYPE: Final = "u1"

TRAIN: Final = "train"
EVAL: Final = "eval"
MAJORITY: Final = "majority"
"""Score of all answers to a held-out task that was answered several times: the reward of the one most agree on."""

MIXTURE: Final = "mix/"
"""Before the label of a task's env, where that is a mixture, in the name of a score that repeats the reward."""

FINISH_REASONS: Final = ("done", "stop", "length", "turns", "tokens", "wall")
"""An episode's end: by its session (`done`), or without a session the end of its answer (`stop`); the limit of one
answer's tokens (`length`), or the key of that name under `rollout.episode`."""
CUT_OFF: Final = frozenset({"length", "tokens"})
"""Those of episodes that a limit of tokens ended."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""A number used in Redis's scripts, which calculate with doubles and loop over granted tickets."""

Tasks = Annotated[int, msgspec.Meta(ge=0, lt=10**8 + 1)]
"""Number of an env's tasks; bounded because the service shuffles an epoch's indices in memory."""

GroupId = Annotated[str, msgspec.Meta(max_length=64)]
"""A number, or `e<version>-<task>` and `e<version>-<task>-<times>`; bounded like all text of a peer that
the service keeps."""
Name = Annotated[str, msgspec.Meta(max_length=1024)]
Word = Annotated[str, msgspec.Meta(max_length=64)]
"""A code, such as a reason, which the service counts by its name."""
ImageId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
"""Hash of an encoded image."""
Incarnation = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
"""Unique name of one start of a process."""
DETAIL_CHARACTERS: Final = 4096
Detail = Annotated[str, msgspec.Meta(max_length=DETAIL_CHARACTERS)]
"""Text for people; the sender truncates it."""
Lengths = Annotated[list[Count], msgspec.Meta(max_length=16_384)]
"""Lengths of episodes in action tokens."""
Settings = Annotated[dict[Name, Detail], msgspec.Meta(max_length=512)]
"""Values of settings that the sender and the service, or the other senders, must agree on; missing ones are not
compared."""
LostTokens = Annotated[dict[Word, Count], msgspec.Meta(max_length=64)]
"""Tokens by the reason for which they are not used."""
Sampled = Annotated[dict[Name, dict[GroupId, Count]], msgspec.Meta(max_length=4096)]
"""Tokens that an engine sampled for tickets so far, by label of their env ('' for evaluations) and id."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
GROUPS_PER_DELIVERY: Final = 4095
AGAIN: Final = "again"
MOST_REWARD: Final = 1e8
"""Largest absolute reward and score: rewards are near 1, and larger ones than this are a mistake of their function."""
MOST_SCORES: Final = 1024
"""Scores of an episode: rewards, their parts, and the env's metrics."""
MOST_TRAJECTORIES: Final = 1 << 18
"""Trajectories of a group. This and the bounds below are far above any group: they bound what a frame, which holds
small elements, becomes in memory."""
MOST_SPANS: Final = 1 << 16
MOST_IMAGES: Final = 1 << 14
MOST_TASKS: Final = 1024
MOST_GPUS: Final = 1024
MOST_EVENT_BYTES: Final = 2 << 20
MOST_EVENTS: Final = 1 << 16
"""Of an episode."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base of all messages."""

    v: int = SCHEMA_VERSION


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the parts of messages."""


# --- records and groups---------------------------------------------------------------------------------------------


class EpisodeEvent(Record, frozen=True):
    """A finished step of an episode, from which another server can go on if this one ends."""

    episode: Annotated[int, msgspec.Meta(ge=0, lt=MOST_TRAJECTORIES)]
    """Index within its group."""
    place: Annotated[int, msgspec.Meta(ge=0, lt=MOST_EVENTS)]
    """Index within its episode."""
    tokens: Count
    """Sampled in it."""
    content: Annotated[bytes, msgspec.Meta(max_length=MOST_EVENT_BYTES)]
    """Read by rollout servers only."""
    v: int = SCHEMA_VERSION
    """Of the content: it stays in Redis when a run goes on with another release."""


class Ticket(Record, frozen=True):
    """The buffer's permission to generate one group."""

    id: str
    kind: str
    """`train`, or `eval`: pinned to `version`, never trained on, and greedy where `samples` is 1."""
    epoch: int
    indices: list[int]
    """Task indices: one for `train`, a slice of the held-out tasks for `eval`."""
    samples: int
    """Answers per task."""
    version: int
    """The server's policy version at issue."""
    greedy: bool = False
    """For `train`: also generate one greedy answer, whose reward is the group's baseline."""
    events: list[EpisodeEvent] = []
    """Kept of the ticket before, whose server was lost, in the order of episodes and places."""


class VersionSpan(Record, frozen=True):
    """Tokens [start, end) of a trajectory came from this policy version, as the engine stamped them."""

    version: Count
    start: Count
    end: Count


class RewardSpan(Record, frozen=True):
    """The reward of one turn of an episode, credited at the token before `end` (exclusive end of the turn)."""

    end: Annotated[int, msgspec.Meta(ge=1)]
    value: float


class AgentSpan(Record, frozen=True):
    """The label of the agent that was given an answer, which is of the actions before `end` and after the span before.

    What the answer earned by itself is in `rewards` of the trajectory, too.
    """

    end: Annotated[int, msgspec.Meta(ge=1)]
    agent: Name
    reward: float = 0.0
    """Posted for this answer, or for the agent; the rest of the episode's reward is that of all its agents."""


class ExpertLayout(Record, frozen=True):
    """Sizes of the choices of experts of a model."""

    layers: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    """Layers that have experts."""
    per_token: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    """Experts that a token is sent to in each."""
    experts: Annotated[int, msgspec.Meta(ge=1, lt=1 << 15)]
    """Experts of a layer; ids of up to 256 are stored in one byte, others in two."""

    @property
    def dtype(self) -> str:
        """Element type of ids."""
        return "u1" if self.experts <= 256 else "<u2"

    @property
    def token_bytes(self) -> int:
        """Bytes of the choices for a token."""
        return self.layers * self.per_token * (1 if self.experts <= 256 else 2)


class RoutedExperts(Record, frozen=True):
    """Experts that an engine chose for the last of a sequence's input tokens; those of earlier ones are unknown.

    The last token of the sequence is no input: it predicts no other one.
    """

    layout: ExpertLayout
    ids: bytes
    """Shape [input tokens, layers, per_token]."""

    @property
    def tokens(self) -> int:
        """Number of input tokens whose experts are known."""
        return len(self.ids) // self.layout.token_bytes


class KeptTokens(Record, frozen=True):
    """The tokens that top-k and top-p left to choose from, in the order of a trajectory's tokens."""

    counts: bytes
    """Their number for each token of the trajectory, shape [T]; 0 where nothing was left out, and in the context."""
    ids: bytes
    """Their ids, those for one token after those for another."""


class Trajectory(Record, frozen=True):
    """One token sequence of an episode; arrays have one element per token, context and actions, in order.

    An episode leaves one trajectory, or several where its token prefix breaks; these share reward and scores.
    """

    token_ids: bytes
    action_mask: bytes
    """1 where the policy chose the token."""
    behaviour_logprobs: bytes
    """log μ of the tokens that the policy chose, 0 elsewhere."""
    spans: Annotated[list[VersionSpan], msgspec.Meta(max_length=MOST_SPANS)]
    """In order; together they cover exactly the tokens that the policy chose."""
    reward: float
    """Total reward of the episode."""
    scores: Annotated[dict[Name, float], msgspec.Meta(max_length=MOST_SCORES)]
    """Each reward term before weighting."""
    finish_reason: Word
    """One of FINISH_REASONS."""
    episode: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    """Index of the episode within its group."""
    rewards: Annotated[list[RewardSpan], msgspec.Meta(max_length=MOST_SPANS)] = []
    """Rewards of single turns, in the order of their ends; empty: the reward arrives with the last action."""
    agents: Annotated[list[AgentSpan], msgspec.Meta(max_length=MOST_SPANS)] = []
    """Labels of its answers, in the order of their ends; empty: it has none."""
    images: Annotated[list[ImageId], msgspec.Meta(max_length=MOST_IMAGES)] = []
    """Images of its context, in the order of their placeholders among the tokens."""
    routed_experts: RoutedExperts | None = None
    """Only with `learner.router_replay`."""
    teacher_prompt: bytes = b""
    """Tokens of the prompt behind which a teacher sees the answer, in place of those before its first action; only with
    a context under `learner.distill`. Empty: it is not distilled."""
    teacher_logprobs: bytes = b""
    """log π_T of the tokens that the policy chose, one after the other; only with an engine as teacher, as the next."""
    teacher_top_ids: bytes = b""
    """The teacher's likeliest tokens at each of them, in falling order, equally many of each."""
    teacher_top_logprobs: bytes = b""
    kept_tokens: KeptTokens | None = None
    """Only with top-k."""


class Group(Message, frozen=True):
    """The trajectories of one ticket; stored in Redis byte for byte as it was sent."""

    id: GroupId
    kind: Word
    epoch: int
    indices: Annotated[list[int], msgspec.Meta(max_length=MOST_TASKS)]
    trajectories: Annotated[list[Trajectory], msgspec.Meta(max_length=MOST_TRAJECTORIES)]
    missing: Count = 0
    """Episodes not finished at the group's deadline or not scored, or held-out tasks without an answer of the ticket's
    version."""
    lost: Annotated[dict[Word, Lengths], msgspec.Meta(max_length=64)] = {}
    """For `train`: those of `missing` that could not be scored, by reason."""
    failures: Annotated[dict[Word, Count], msgspec.Meta(max_length=64)] = {}
    """For `eval`: the missing tasks by reason; the others have `samples` episodes each, one task after the other."""
    greedy_reward: float | None = None
    """Reward of the greedy answer, for a ticket that requested one; the answer itself is not trained on."""
    images: Annotated[dict[ImageId, bytes], msgspec.Meta(max_length=MOST_IMAGES)] = {}
    """Encoded images of the trajectories, each once, as the env gave them."""
    unused: LostTokens = {}
    """Tokens sampled for the ticket that are neither in `trajectories` nor in `lost`, by reason."""


class ServerStatus(Record, frozen=True):
    """Counters of a rollout server since its start."""

    server: Name = ""
    version: Count = 0
    tokens_generated: int = 0
    busy_s: float = 0.0
    """Time with at least one running episode."""
    up_s: float = 0.0
    """Time since the engine was ready."""
    groups_limit: int = 0
    """Groups that it may have in flight now."""
    engine_deaths: int = 0
    """Restarts of its engine."""
    requests_restarted: int = 0
    """Requests that restarted at their first token after a crash of the engine."""
    prompt_tokens: int = 0
    """Tokens of the prompts of its answers, those of earlier turns included."""
    cached_tokens: int = 0
    """Those of them that its engine had in its KV cache."""
    kv_cache_use: float | None = None
    """Used share of the engine's KV cache, from 0 to 1; None, as the next two: the engine has not reported it."""
    running: int | None = None
    """Answers that are being generated."""
    waiting: int | None = None
    """Answers that are not, for want of room."""
    stall_s: float | None = None
    """Pause of generation in the last update of the weights; None, as the next: there was none."""
    update_s: float | None = None
    """Time of that update, from its announcement until the engine had it."""
    gpus: Annotated[list[Name], msgspec.Meta(max_length=MOST_GPUS)] = []
    """Identities of the GPUs that its engine uses."""


class LedgerCounts(Record, frozen=True):
    """Groups by state: issued = in_flight + ready + leased + trained + filtered + expired + reissued."""

    issued: int = 0
    in_flight: int = 0
    ready: int = 0
    leased: int = 0
    trained: int = 0
    """Trained groups, durable ones included."""
    durable: int = 0
    """Those of `trained` that a saved checkpoint contains."""
    filtered: int = 0
    expired: int = 0
    reissued: int = 0
    skipped_tasks: int = 0
    """Tasks for which no ticket was issued in an epoch, because the curriculum skipped them."""
    uses: int = 0
    """Uses in training steps: more than `trained` when a group may be used several times."""
    tokens: int = 0
    """Action tokens of all groups that were delivered."""
    answers_dropped: dict[str, int] = {}
    """Answers that are never trained on, by reason: of dropped groups, or removed by filters."""
    reasons: dict[str, int] = {}
    """`filtered:<reason>` and `expired:<reason>`."""
    dropped_frames: int = 0
    """Malformed messages since the service started."""
    spilled: int = 0
    """Groups whose bytes are in spill files of the run folder, trained ones and those of undone steps."""
    spilled_bytes: int = 0
    spill_errors: int = 0
    """Spill files that could not be written or read, since the service started."""


class EvalReport(Record, frozen=True):
    """A finished evaluation."""

    version: int
    score: float
    """Mean over the answered tasks of the mean reward of their answers; 0 without any."""
    tasks: int
    """Answered tasks."""
    failures: dict[str, int]
    """Tasks without an answer, by reason."""
    eval_s: float
    group_ids: list[str]
    estimates: dict[str, float] = {}
    """`score_interval`, half the width of its 95 % interval; for several answers per task also `pass_at_k` and
    `maj_at_k` with theirs."""

    @property
    def failed(self) -> int:
        """Tasks without an answer."""
        return sum(self.failures.values())

    @property
    def coverage(self) -> float:
        """Share of the tasks that were answered; 0 without tasks."""
        return self.tasks / max(1, self.tasks + self.failed)

    @property
    def lower_bound(self) -> float:
        """Mean over all tasks, failed ones as 0."""
        return self.score * self.coverage


# --- rollout server and buffer -------------------------------------------------------------------------------------


class ServerHello(Message, frozen=True):
    """Registers a rollout server; refused if it does not match the run."""

    run: Name
    env: Name
    env_fingerprint: Name
    train_tasks: Tasks
    eval_tasks: Tasks
    tokenizer_fingerprint: Name
    vocab_size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    """The model's number of token ids."""
    incarnation: Incarnation
    """Tickets of an earlier incarnation of the same name are reissued."""
    model_fingerprint: Name = ""
    """Of the run's initial model; a server with another one is refused. Empty: not compared."""
    settings: Settings = {}


class ServerGoodbye(Message, frozen=True):
    """A rollout server stops: its undelivered tickets are issued again."""

    incarnation: Incarnation
    """That of the hello: a late goodbye must not affect a successor of the same name."""
    sampled: Sampled = {}
    """Of the tickets that it gives back."""


class Welcome(Message, frozen=True):
    """The service accepts a peer; `version` is the latest published policy version."""

    version: int


class Refused(Message, frozen=True):
    """The service refuses a request or a peer."""

    reason: str
    request: int = 0


class UnknownPeer(Message, frozen=True):
    """The peer is not registered (the service was restarted, or Redis has lost the hello): it must repeat its hello."""

    request: int = 0


class Credits(Message, frozen=True):
    """Heartbeat of a rollout server, also sent on every change: the number of tickets it can hold, and its status."""

    capacity: Annotated[int, msgspec.Meta(ge=0, lt=1_000_000)]
    status: ServerStatus
    held: Annotated[list[GroupId], msgspec.Meta(max_length=1_000_000)]
    """Ids of tickets in progress or finished but not acknowledged; other tickets sent to it were lost on the way."""
    sampled: Sampled = {}
    """Of these tickets."""


class Tickets(Message, frozen=True):
    """Granted tickets."""

    tickets: list[Ticket]
    grant: Name = msgspec.field(default_factory=lambda: secrets.token_hex(8))
    """Unique per message: after Redis has lost the end of its file, new tickets repeat the ids of lost ones."""


class EvalDrained(Message, frozen=True):
    """No evaluation ticket of this version is left to grant: the server may switch to newer weights."""

    version: int


class Deliver(Message, frozen=True):
    """Groups follow, one frame each, in this order."""

    ids: Annotated[list[GroupId], msgspec.Meta(max_length=GROUPS_PER_DELIVERY)]
    sampled: Sampled = {}
    """Of these tickets, all of their tokens."""


class GroupFailed(Message, frozen=True):
    """A ticket failed; its group counts as filtered with this reason."""

    id: GroupId
    kind: Word
    """The ticket's kind."""
    reason: Word
    detail: Detail
    tokens: Count = 0
    lengths: Lengths = []
    """Of its finished episodes."""
    sampled: Sampled = {}
    """Of this ticket, all of its tokens."""
    unused: LostTokens = {}
    """All of them, by reason."""
    reissue: bool = False
    """The ticket came to nothing before anything was done for it: the task is issued again."""


class KeepEvent(Message, frozen=True):
    """Keeps an event of an episode in flight until the ticket's group is settled; acknowledged by its `name`."""

    id: GroupId
    """Of the ticket."""
    env: Name
    """Label of its env."""
    event: EpisodeEvent

    @property
    def name(self) -> str:
        """The event in an `Acknowledge`: `<ticket>/<episode>/<place>`."""
        return f"{self.id}/{self.event.episode}/{self.event.place}"


class Acknowledge(Message, frozen=True):
    """Outcomes of groups and events; the sender may delete all except those with `again`."""

    outcomes: dict[str, str]
    """Id → `ready`, `filtered`, `reissued`, `evaluated`, `duplicate`, `void` (the ticket had expired), `finished` (the
    run is over), or `again`: it arrived damaged or was lost, and must be sent again. Of an event `kept`, `void`, or
    `full`: the ticket's events have too many bytes."""


# --- learner and buffer: a run has one learner, that of the latest hello; others are refused -------------------


class LearnerHello(Message, frozen=True):
    """Registers a learner that has done `step` steps; groups trained in later steps return to ready.

    Refused if a checkpoint of the run contains later steps, unless `undo` is set.
    """

    request: int
    incarnation: Incarnation
    run: Name
    step: Count
    model_fingerprint: Name = ""
    """Of the run's initial model; a learner with another one is refused. Empty: not compared."""
    version: Count = 0
    """The last policy version that its weights, or those of an earlier step of its own history, were published as."""
    vocab_size: Count = 0
    """The model's number of token ids; 0: not compared."""
    undo: bool = False
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
    """Ids of the leased groups; the learner reads them from Redis."""

    request: int
    group_ids: list[str]
    importance_weights: list[float]
    """Weight of each group in the step: 1, or the importance weight of its draw (`prioritized`)."""
    oldest_version: int
    staleness: list[int]
    """Staleness of tokens of `oldest_version`, of the version after it, and so on to the groups' newest."""


class NotReady(Message, frozen=True):
    """Too few groups were ready within `wait_s`."""

    request: int


class Trained(Message, frozen=True):
    """The groups leased for `step` went into an optimizer step."""

    request: int
    incarnation: Incarnation
    step: Count


class Published(Message, frozen=True):
    """The learner's weights are now `version`; `evaluate` asks for an evaluation of it."""

    request: int
    incarnation: Incarnation
    version: Count
    evaluate: bool


class Throttle(Message, frozen=True):
    """The present staleness bound of the learner; the smaller of it and `buffer.max_staleness` applies."""

    request: int
    incarnation: Incarnation
    max_staleness: Count


class Checkpointed(Message, frozen=True):
    """A checkpoint that contains the first `step` steps is on disk."""

    request: int
    incarnation: Incarnation
    step: Count


class Finish(Message, frozen=True):
    """Ends the run: no more tickets, and groups in flight expire."""

    request: int
    incarnation: Incarnation


class StateRequest(Message, frozen=True):
    """Requests the state of the buffer and of its servers."""

    request: int


class State(Message, frozen=True):
    """Answer to every learner request except a lease request."""

    request: int
    version: int
    counts: LedgerCounts
    servers: list[ServerStatus]
    evals: list[EvalReport]
    """The latest finished evaluations."""
    length_bias: dict[str, float] = {}
    """Kolmogorov-Smirnov distance of the lengths of trained and of dropped (`<reason>`) answers from all delivered."""
    tasks: dict[str, int] = {}
    """Tasks by the outcome of their latest group: `solved`, `unsolved` or `mixed`; with the filter `dynamic_sampling`
    or `buffer.curriculum`."""


FromServer = ServerHello | ServerGoodbye | Credits | Deliver | GroupFailed | KeepEvent
FromLearner = LearnerHello | LeaseRequest | Trained | Published | Throttle | Checkpointed | Finish | StateRequest
ToService = FromServer | FromLearner
ToServer = Welcome | Refused | UnknownPeer | Tickets | EvalDrained | Acknowledge
ToLearner = Refused | UnknownPeer | Lease | NotReady | State
