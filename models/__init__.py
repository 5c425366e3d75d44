"""Models: their folders, facts about them, and their tensors, for the learner and the rollout servers."""
