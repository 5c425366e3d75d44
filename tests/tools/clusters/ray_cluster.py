"""A Ray cluster of several nodes on this machine: prints its address, then obeys the lines on stdin.

Arguments: the cores of the head, then those of each other node; a node that is added has as many as the last.

`kill N` ends a node as a power failure would, `add` adds one, `stop` or the end of stdin ends the cluster. Each is
answered with a line. Run by the interpreter of an environment with Ray.
"""

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    head, *others = map(int, sys.argv[1:])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": head, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=cores) for cores in others]
    _answer(cluster.address)
    try:
        for line in sys.stdin:
            action, *number = line.split()
            if action == "kill":
                cluster.remove_node(nodes[int(number[0])], allow_graceful=False)
            elif action == "add":
                nodes.append(cluster.add_node(num_cpus=others[-1]))
            else:
                break
            _answer("done")
    finally:
        cluster.shutdown()


def _answer(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
