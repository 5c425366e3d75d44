"""One handler per kind of peer message: ingest, rollout servers, learners."""
