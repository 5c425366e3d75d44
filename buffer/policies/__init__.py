"""The decisions of the buffer as pure functions: values and a random generator in, values out.

filters    the answers of an arriving group that are used; PF-PPO
sampling   the order in which ready groups are leased, and their importance weights
admission  limits on the groups that are issued, and the shares of the servers
curriculum the tasks that are skipped
statistics lengths of dropped and kept answers, estimates from the rewards of held-out tasks

No module here imports Redis, sockets, clocks or the wire.
"""
