"""The decisions of the buffer as pure functions: values and a random generator in, values out.

filters   the answers of an arriving group that are used
pf_ppo    PF-PPO: resampling of answers by the rank of their reward, and the choice of its strategy
sampling  the order in which ready groups are leased, and their importance weights
admission expected use of generated groups
limiter   bounds on the ratio of uses to insertions
lengths   comparison of the lengths of dropped and kept answers

No module here imports Redis, sockets, clocks or the wire.
"""
