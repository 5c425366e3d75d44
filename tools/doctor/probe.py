"""Tries connections, and tells the time. Other hosts run the text of this file: it needs Python 3.6, nothing else."""

import json
import socket
import sys
import time


def reach(host: str, port: int, timeout_s: float) -> str:
    """The outcome of a TCP connection: `open`, `refused`, or the reason why no answer came."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except ConnectionRefusedError:
        return "refused"
    except socket.gaierror as error:
        return f"the name can't be resolved: {error.strerror}"
    except OSError as error:
        return str(error)
    return "open"


if __name__ == "__main__":
    print("{}", flush=True)  # logged in, and started
    for line in sys.stdin:
        targets = json.loads(line)
        answer = {"time": time.time(), "outcomes": [reach(*target) for target in targets]}
        print(json.dumps(answer), flush=True)
