"""The learner: leases groups, trains on them with the correction for their staleness, publishes new weights."""
