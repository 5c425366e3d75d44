"""The replay buffer and the Redis that it stands on."""

from fractions import Fraction
from typing import Annotated, Literal, Self
from urllib.parse import parse_qsl, urlsplit

from pydantic import Field, model_validator

from slipstream.configs.runtime.passwords import REDIS_PASSWORD_VARIABLE
from slipstream.configs.schema.base import Seconds, Section, UserPath


class CurriculumConfig(Section):
    """Skips tasks whose groups have no spread of rewards: all answers solve the task, or none does."""

    after_groups: int = Field(default=2, ge=1)
    """Groups of a task in a row, all solved or all unsolved, after which the task is skipped."""
    issue_probability: float = Field(default=0.1, gt=0, lt=1)
    """Probability with which such a task is issued all the same, drawn anew in each epoch."""


class LimiterConfig(Section):
    """Limits on the use of groups (Reverb's SampleToInsertRatio, arXiv 2102.04736)."""

    max_uses: int = Field(default=1, ge=1)
    """Training steps that one group may be used in."""
    samples_per_insert: float | None = Field(default=None, gt=0)
    """Uses per inserted group that leases are held to, over the groups that are there; unset: no such limit."""
    tolerance: float = Field(default=0.0, ge=0)
    """Uses by which leases may run ahead of, or insertions ahead of, `samples_per_insert`."""
    min_ready: int = Field(default=0, ge=0)
    """Nothing is leased until this many groups have been inserted."""

    def problems(self, *, groups_per_step: int) -> list[str]:
        """Settings that would stop leases and insertions for good."""
        if self.samples_per_insert is None:
            return []
        problems = []
        if self.max_uses < self.samples_per_insert:
            problems.append(
                f"buffer.limiter.max_uses={self.max_uses} is less than "
                f"buffer.limiter.samples_per_insert={self.samples_per_insert:g}: the uses could never be had"
            )
        least = smallest_tolerance(
            samples_per_insert=self.samples_per_insert, groups_per_step=groups_per_step, min_ready=self.min_ready
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

    Reverb, which leases one at a time, requires max(1, s); for c = 1 the second rule requires at most (1 + s)/2.
    """
    to_fill_a_step = samples_per_insert * max(0, groups_per_step - min_ready)
    return max(to_fill_a_step, _to_always_move(samples_per_insert, groups_per_step))


def _to_always_move(samples_per_insert: float, groups_per_step: int) -> float:
    ratio = Fraction(samples_per_insert).limit_denominator(1_000_000)
    if float(ratio) != samples_per_insert:  # no ratio of a kind that a user writes: 1/q is next to nothing
        return (samples_per_insert + groups_per_step) / 2
    return float(Fraction((ratio + groups_per_step) * ratio.denominator // 2, ratio.denominator))


class RedisConfig(Section):
    """The durable store."""

    url: str | None = None
    """`redis://host:port/db`, `rediss://…` (TLS) or `unix:///path?db=0` of a running server, with or without `user@`,
    never with a password: that comes from the environment variable SLIPSTREAM_REDIS_PASSWORD. Unset: `slipstream up`
    starts an embedded server, which requires that password too if it is set. Redis 7.0 or later, or Valkey."""
    ca_file: UserPath | None = None
    """Of `rediss://`: certificates (PEM) of the server's authorities; unset: the system's."""
    cert_file: UserPath | None = None
    """Of `rediss://`: this client's certificate (PEM), for a server that requires one."""
    key_file: UserPath | None = None
    """Of `rediss://`: the private key of `redis.cert_file` (PEM)."""
    port: int = Field(default=6399, ge=1, le=65535)
    """Loopback port of the embedded server."""
    fsync: Literal["everysec", "always"] = "everysec"
    """The embedded server's AOF: `everysec` may lose a second or two when the power fails, or when the process is
    killed while its disk is busy; `always` loses nothing and is slow."""
    deadline_s: Seconds = 10.0
    """Deadline of a command; after it the command is tried again."""
    outage_deadline_s: Seconds = 300.0
    """Longest outage: of Redis, for the buffer, and of a buffer that has answered before, for the learner; after it the
    process exits with an error."""

    @model_validator(mode="after")
    def _usable_url(self) -> Self:
        if self.url is None:
            return self
        if not self.url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("redis.url must start with redis://, rediss:// or unix://")
        rest = self.url.partition("://")[2]
        parameters = dict(parse_qsl(rest.partition("?")[2], keep_blank_values=True))
        if ":" in rest.rpartition("@")[0] or any("passw" in name for name in parameters):
            raise ValueError(
                "redis.url must not hold a password; take it out and set the environment variable "
                f"{REDIS_PASSWORD_VARIABLE} to it"
            )
        if parameters.keys() - {"db"}:
            unknown = ", ".join(sorted(parameters.keys() - {"db"}))
            raise ValueError(f"redis.url has the parameters {unknown}, but only db is known; see the keys of redis")
        database = _database(self.url, named=parameters.get("db"))
        if database is None:
            raise ValueError(
                f"redis.url={self.url} must look like redis://host:port/db or unix:///path?db=0, with a port from 1 to "
                "65535 and a database from 0"
            )
        return self

    @model_validator(mode="after")
    def _tls(self) -> Self:
        given = [key for key in ("ca_file", "cert_file", "key_file") if getattr(self, key) is not None]
        if given and not self.address.startswith("rediss://"):
            raise ValueError(f"redis.{given[0]} is for TLS, but redis.url does not start with rediss://")
        if ("cert_file" in given) != ("key_file" in given):
            raise ValueError("redis.cert_file and redis.key_file belong together; give both or neither")
        return self

    @property
    def address(self) -> str:
        """The URL that clients connect to."""
        return self.url or f"redis://127.0.0.1:{self.port}/0"


def _database(url: str, *, named: str | None) -> int | None:
    """Number of a Redis URL's database; None if that or the port is no number that it can be."""
    try:
        parts = urlsplit(url)
        path = "" if parts.scheme == "unix" else parts.path.strip("/")
        database = int(named or path or 0)
        return database if parts.port != 0 and database >= 0 else None
    except ValueError:
        return None


def _port(address: str) -> int | None:
    """The port of an address, if it is one."""
    try:
        return urlsplit(address).port
    except ValueError:
        return None


class DynamicSamplingConfig(Section):
    """Drops groups whose answers all got the same reward: their advantages are zero (DAPO, arXiv 2503.14476)."""

    name: Literal["dynamic_sampling"]
    """Name of the filter."""
    score: str | None = None
    """Reward term that is judged instead of the trained reward, such as `exact_match`; `env`: what sessions give."""


class LengthFilterConfig(Section):
    """Drops answers outside a range of lengths."""

    name: Literal["length"]
    """Name of the filter."""
    min_tokens: int = Field(default=0, ge=0)
    """Shorter answers are dropped."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longer answers are dropped; unset: no limit."""
    drop_truncated: bool = False
    """Also drop answers that were cut off at their limit of tokens."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        return self


class FiltrationConfig(Section):
    """Policy filtration (PF-PPO, arXiv 2409.06957): a group's answers are sampled again by the rank of their reward."""

    name: Literal["pf_ppo"]
    """Name of the filter."""
    strategy: Literal["best_of_n", "best_random", "best_worst", "pow"] = "best_random"
    """Weights of the ranks: (1,0,…,0); (½, ½/(N-1), …); (½,0,…,0,½); or |reward|^exponent."""
    keep: int = Field(ge=1)
    """Answers drawn, with replacement, from the group's `rollout.group_size`."""
    exponent: float = Field(default=1.0, gt=0)
    """Exponent p of the strategy `pow`."""


Filter = Annotated[DynamicSamplingConfig | LengthFilterConfig | FiltrationConfig, Field(discriminator="name")]


class SamplerConfig(Section):
    """Order in which ready groups are leased."""

    name: Literal["fifo", "freshest", "uniform", "prioritized"] = "fifo"
    """By ticket, by newest policy version, at random, or at random with a group's spread of rewards as its weight."""
    exponent: float = Field(default=1.0, ge=0)
    """Of `prioritized`: the weight is spread^exponent."""
    importance_exponent: float = Field(default=0.0, ge=0, le=1)
    """Of `prioritized`: β of the importance weights p^-β in the policy's and the critic's loss, where p is the
    probability of the group's draw, scaled so that a step's groups with spread weigh at most 1 (arXiv 1511.05952); 0:
    all weigh 1; 1: the bias of the selection is fully corrected."""


class RetentionConfig(Section):
    """Retention of groups that are over: durable, filtered, expired, reissued."""

    max_groups: int = Field(default=1000, ge=0)
    """The latest ones that are kept: their history, and the bytes of the durable ones."""
    max_age_s: float | None = Field(default=None, gt=0)
    """Older ones are forgotten too; unset: no limit of age."""
    keep_until_exported: bool = False
    """Keep durable groups until `slipstream ledger export` has written them, whatever their number and age."""


class BufferConfig(Section):
    """The service that issues tickets, stores groups and leases them."""

    bind: str = "tcp://127.0.0.1:5555"
    """Address on which the service listens; default: loopback only."""
    endpoint: str = "tcp://127.0.0.1:5555"
    """Address at which rollout servers and learners connect to it."""
    filters: tuple[Filter, ...] = ()
    """Applied to every group on its arrival, in this order."""
    curriculum: CurriculumConfig | None = None
    """Of the order of tasks; unset: each task is issued once in each epoch."""
    sampler: SamplerConfig = SamplerConfig()
    limiter: LimiterConfig = LimiterConfig()
    retention: RetentionConfig = RetentionConfig()
    keep_trained: Literal["auto", "all"] | Annotated[int, Field(ge=0)] = "auto"
    """Latest steps whose groups are kept in the run folder, compressed, for `slipstream replay`: a number, or `all`.
    `auto`: `learner.checkpoint.keep` · `learner.checkpoint.every_steps`, unless `every_steps` take more than 1 GiB."""
    max_staleness: int = Field(default=4, ge=0)
    """Most versions that may lie between the oldest action token of a trajectory and the version that consumes it."""
    ticket_deadline_s: Seconds = 600.0
    """A ticket that is not delivered by then is void and its task is issued again."""
    lease_deadline_s: Seconds = 600.0
    """Leased groups that are not trained by then return to `ready`."""
    server_deadline_s: Seconds = Field(default=10.0, ge=2)
    """The tickets of a rollout server that is silent for so long are void and their tasks are issued again. Longer than
    the network takes for one group, and at least 2: heartbeats come once a second."""
    reply_deadline_s: Seconds = 30.0
    """Deadline of the service's first answer to a learner; after it the learner exits."""

    @model_validator(mode="after")
    def _ports(self) -> Self:
        for address in (self.bind, self.endpoint):
            if not address.startswith(("tcp://", "ipc://")):
                raise ValueError(
                    f"the address {address} must begin with tcp:// or ipc://, such as tcp://127.0.0.1:5555"
                )
            if address.startswith("tcp://") and not _port(address):
                raise ValueError(
                    f"the address {address} must end with a port from 1 to 65535, and an IPv6 host stands in brackets, "
                    "such as tcp://[::1]:5555"
                )
        if self.endpoint.startswith("tcp://*"):
            raise ValueError(
                f"the endpoint {self.endpoint} names no host: * stands for all addresses to listen on (bind)"
            )
        return self
