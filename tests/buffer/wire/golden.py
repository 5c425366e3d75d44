"""One example of every message that matters, and the bytes that it had when its format was last agreed on.

A change of these bytes breaks running processes of another release and groups that lie in Redis. Where that is meant,
raise SCHEMA_VERSION and write the file anew: `.venv/bin/python -m tests.buffer.wire.golden`.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import encode
from slipstream.buffer.wire.weights import protocol as w

FRAMES = Path(__file__).with_name("golden_frames.json")

_STATUS = m.ServerStatus(
    server="r0",
    version=3,
    tokens_generated=1200,
    busy_s=7.5,
    up_s=8.0,
    engine_deaths=1,
    requests_restarted=2,
    groups_limit=4,
    kv_cache_use=0.5,
    running=6,
    waiting=2,
    stall_s=0.25,
    update_s=1.5,
    gpus=["GPU-1"],
)
_SAMPLED = {"digits": {"17": 300}, "": {"e3-0": 20}}
_TICKET = m.Ticket(id="17", kind=m.TRAIN, epoch=1, indices=[5], samples=8, version=3, greedy=True)
_EVENT = m.EpisodeEvent(episode=1, place=2, tokens=3, content=b"turn")
_RESUMED = msgspec.structs.replace(_TICKET, events=[_EVENT])
_TRAJECTORY = m.Trajectory(
    token_ids=bytes.fromhex("0100000002000000ff000000"), action_mask=bytes.fromhex("000101"),
    behaviour_logprobs=bytes.fromhex("00000000000000bf000080be"),
    spans=[m.VersionSpan(version=3, start=1, end=2), m.VersionSpan(version=4, start=2, end=3)], reward=0.5,
    scores={"exact_match": 0.0, "digit_match": 0.5}, finish_reason="stop", episode=1,
    rewards=[m.RewardSpan(end=2, value=0.25), m.RewardSpan(end=3, value=0.25)], images=["8a"],
    agents=[m.AgentSpan(end=2, agent="search", reward=0.25), m.AgentSpan(end=3, agent="")],
    routed_experts=m.RoutedExperts(
        layout=m.ExpertLayout(layers=1, per_token=2, experts=4), ids=bytes.fromhex("00030201")
    ),
    kept_tokens=m.KeptTokens(counts=bytes.fromhex("000000000200000000000000"), ids=bytes.fromhex("0200000007000000")),
)  # fmt: skip
_COUNTS = m.LedgerCounts(
    issued=21, in_flight=1, ready=2, leased=3, trained=4, durable=2, filtered=5, expired=2, reissued=4, skipped_tasks=6,
    uses=4, tokens=99, reasons={"filtered:malformed": 5, "expired:too_stale": 2},
    answers_dropped={"too_stale": 16}, dropped_frames=1, spilled=2, spilled_bytes=140_000, spill_errors=1,
)  # fmt: skip
_REPORT = m.EvalReport(
    version=3, score=0.75, tasks=64, failures={"superseded": 1}, eval_s=1.5, group_ids=["e3-0"],
    estimates={"score_interval": 0.1},
)  # fmt: skip
_MANIFEST = w.Manifest(
    version=4, tensors=[w.TensorInfo(name="model.embed_tokens.weight", dtype="bfloat16", shape=[16, 64])],
    bucket_bytes=1 << 20, evaluate=True, checksums=[1 << 63], probe=w.Probe(token_ids=[5, 6], logprobs=[-1.5]),
)  # fmt: skip
_SOURCE = w.Source(place="tcp://10.0.0.1:5558", parts=[w.Part(name="4", version=4, size_bytes=100, base=3)])

EXAMPLES: dict[str, tuple[Any, m.Message]] = {
    "server_hello": (
        m.ToService,
        m.ServerHello(
            run="demo", env="digits", env_fingerprint="e1", train_tasks=900, eval_tasks=100, tokenizer_fingerprint="t1",
            vocab_size=32, incarnation="i1", model_fingerprint="m1", settings={"rollout.sampling.temperature": "1.0"},
        ),
    ),
    "server_goodbye": (m.ToService, m.ServerGoodbye(incarnation="another process", sampled=_SAMPLED)),
    "credits": (m.ToService, m.Credits(capacity=64, status=_STATUS, held=["17", "18"], sampled=_SAMPLED)),
    "deliver": (m.ToService, m.Deliver(ids=["17", "18"], sampled=_SAMPLED)),
    "group": (
        m.Group,
        m.Group(
            id="17", kind=m.TRAIN, epoch=1, indices=[5], trajectories=[_TRAJECTORY], missing=2,
            lost={"reward_timeout": [31]}, greedy_reward=0.25, images={"8a": b"png"},
            unused={"unfinished": 12},
        ),
    ),
    "keep_event": (m.ToService, m.KeepEvent(id="17", env="digits", event=_EVENT)),
    "group_failed": (
        m.ToService,
        m.GroupFailed(
            id="17", kind=m.TRAIN, reason="reward_raised", detail="ValueError", tokens=31, lengths=[11, 20],
            sampled={"digits": {"17": 31}}, unused={"reward_raised": 31},
        ),
    ),
    "learner_hello": (
        m.ToService,
        m.LearnerHello(
            request=1, incarnation="a1", run="demo", step=100, model_fingerprint="m1", vocab_size=32, undo=True,
            settings={"learner.groups_per_step": "32"},
        ),
    ),
    "lease_request": (
        m.ToService, m.LeaseRequest(request=2, incarnation="a1", step=100, count=32, consuming_version=50, wait_s=1.0),
    ),
    "trained": (m.ToService, m.Trained(request=3, incarnation="a1", step=100)),
    "published": (m.ToService, m.Published(request=4, incarnation="a1", version=51, evaluate=False)),
    "throttle": (m.ToService, m.Throttle(request=8, incarnation="a1", max_staleness=2)),
    "checkpointed": (m.ToService, m.Checkpointed(request=5, incarnation="a1", step=101)),
    "finish": (m.ToService, m.Finish(request=6, incarnation="a1")),
    "state_request": (m.ToService, m.StateRequest(request=7)), "welcome": (m.ToServer, m.Welcome(version=3)),
    "refused": (m.ToServer, m.Refused(reason="this buffer serves run 'demo'", request=1)),
    "unknown_peer": (m.ToServer, m.UnknownPeer(request=3)),
    "tickets": (m.ToServer, m.Tickets(tickets=[_TICKET, _RESUMED], grant="g1")),
    "eval_drained": (m.ToServer, m.EvalDrained(version=3)),
    "acknowledge": (m.ToServer, m.Acknowledge(outcomes={"17": "ready", "18": "duplicate"})),
    "lease": (
        m.ToLearner,
        m.Lease(
            request=2, group_ids=["17", "18"], importance_weights=[1.0, 0.5], oldest_version=48, staleness=[2, 1, 0]
        ),
    ),
    "not_ready": (m.ToLearner, m.NotReady(request=2)),
    "state": (
        m.ToLearner,
        m.State(
            request=7, version=3, counts=_COUNTS, servers=[_STATUS], evals=[_REPORT], length_bias={"trained": 0.25},
            tasks={"mixed": 3},
        ),
    ),
    "join": (
        w.FromServer,
        w.Join(
            run="demo", server="r0", incarnation="a1", version=3, staged=3, host="boot:26", transports=["shm", "gloo"],
            workers=1,
        ),
    ),
    "leave": (w.FromServer, w.Leave()), "entered": (w.FromServer, w.Entered(transfer=7)),
    "ready": (w.FromServer, w.Ready(transfer=7, version=4)), "loaded": (w.FromServer, w.Loaded(transfer=7, version=4)),
    "applied": (w.FromServer, w.Applied(transfer=7, version=4, stall_s=0.25, verified=w.BY_PROBE, deviation=0.001)),
    "failed": (w.FromServer, w.Failed(transfer=7, stage="receive", detail="no room")),
    "form": (
        w.FromLearner,
        w.Form(transfer=7, epoch=2, transport="gloo", host="127.0.0.1", port=5557, rank=1, world=2, deadline_s=60.0),
    ),
    "announce": (
        w.FromLearner, w.Announce(transfer=7, transport="stream", manifest=_MANIFEST, deadline_s=60.0, source=_SOURCE),
    ),
    "sending": (w.FromLearner, w.Sending(transfer=7, version=4)),
    "apply": (w.FromLearner, w.Apply(transfer=7, version=4)), "ping": (w.FromLearner, w.Ping()),
    "queued": (w.FromLearner, w.Queued(ahead=3)), "evicted": (w.FromLearner, w.Evicted(reason="silent", retry_s=60.0)),
    "pull": (w.Pull, w.Pull(part="4", offset=1 << 20, size_bytes=1 << 18)),
    "piece": (w.FromStream, w.Piece(part="4", offset=1 << 20)), "gone": (w.FromStream, w.Gone(part="3")),
}  # fmt: skip


def stored_frames() -> dict[str, bytes]:
    """The bytes that were agreed on, by name."""
    return {name: bytes.fromhex(text) for name, text in json.loads(FRAMES.read_text(encoding="utf-8")).items()}


if __name__ == "__main__":
    frames = {name: encode(message).hex() for name, (_, message) in EXAMPLES.items()}
    FRAMES.write_text(json.dumps(frames, indent=1) + "\n", encoding="utf-8")
