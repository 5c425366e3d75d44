"""`slipstream up`: the processes of a run on one machine."""
