"""`slipstream bench staleness`: what each objective makes of data that is k steps old, through the real learner."""
