"""How the learner hands the bytes of a version out."""
