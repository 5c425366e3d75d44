"""`python -m slipstream.env.adapters.harbor FOLDER`: where each task runs, and its reward for nothing and its solution.

In a data set that is in order these are 0 and 1.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import get_args

from slipstream.configs.runtime.errors import ConfigError
from slipstream.env.adapters.harbor.env import REWARD, Catalog, Runtime, chosen
from slipstream.env.adapters.harbor.folder import HarborTask
from slipstream.env.base import EnvFailed


async def show(catalog: Catalog, tasks: Sequence[HarborTask], key: str) -> bool:
    """Prints a line for each task; true if all rewards are as they must be."""
    good = True
    for task in tasks:
        shown = [await _reward(catalog, task, key, solved=solved) for solved in (False, True)]
        good &= shown == ["0", "1"]
        sys.stdout.write(f"{task.name:<40} {catalog.runtime(task):<8} nothing {shown[0]}, solution {shown[1]}\n")
        sys.stdout.flush()
    return good


async def _reward(catalog: Catalog, task: HarborTask, key: str, *, solved: bool) -> str:
    try:
        async with catalog.place(task) as place:
            if solved:
                await place.solve()
            return f"{chosen(await place.rewards(), key).value:g}"
    except EnvFailed as error:
        return f"failed ({error})"


def main() -> int:
    """Exit code 1 for a data set that is not in order."""
    parser = argparse.ArgumentParser(prog="python -m slipstream.env.adapters.harbor", description=__doc__)
    parser.add_argument("folder", help="a folder of task folders, or one task")
    parser.add_argument("--runtime", choices=get_args(Runtime), default="auto")
    parser.add_argument("--reward-key", default=REWARD, help="which of several rewards; default: %(default)s")
    given = parser.parse_args()
    catalog = Catalog(given.runtime)
    try:
        tasks = catalog.read(given.folder)
    except ConfigError as error:
        catalog.problems.append(str(error))
        tasks = []
    sys.stderr.writelines(f"{problem}\n" for problem in catalog.problems)
    good = asyncio.run(show(catalog, tasks, given.reward_key))
    return 0 if good and not catalog.problems else 1


if __name__ == "__main__":
    sys.exit(main())
