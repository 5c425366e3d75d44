"""The decisions of the buffer as pure functions: values and a random generator in, values out.

filters     which answers of a group that arrives are used
filtration  PF-PPO's draw of answers by the rank of their reward, and how its strategy is chosen
sampling    which ready group is leased first, and what it then counts
limiter     how far uses and insertions may run ahead of each other
lengths     whether what was dropped had other lengths than what was kept

Nothing here knows of Redis, sockets, clocks or the wire.
"""
