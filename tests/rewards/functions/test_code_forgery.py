"""Programs that try to pass tests without solving the task, here and through Sandbox Fusion's API."""

from collections.abc import AsyncIterator

import pytest

from slipstream.rewards.functions.code import Code
from tests.rewards.episodes import episode
from tests.rewards.functions.fusion import fusion
from tests.rewards.functions.http_server import serving

pytestmark = pytest.mark.usefixtures("sandbox")

CHECK = "assert double(2021) == 4042"
NEAR = "assert abs(double(2021) - 4042) < 1e-6"
SETS = "assert set(pair(1)) == set((1, 2))"
CALLS = "assert apply(lambda x: x + 1, 3) == 4"
TAKES = """
import os, gc, sys
def take(scope):
    for value in list(scope.values()):
        if isinstance(value, bytes) and 8 < len(value) < 200:
            for file in range(3, 64):
                try: os.write(file, value)
                except OSError: pass
def take_all(frame):
    while frame:
        take(frame.f_locals), take(frame.f_globals)
        frame = frame.f_back
"""
"""Writes what looks like a secret in the variables of frames to all open files."""
EQUAL = """
class Equal:
    def __eq__(self, other): return True
    __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __eq__
    def __hash__(self): return 0
    def __sub__(self, other): return self
    def __abs__(self): return self
    def __iter__(self): return iter([self])
"""
ATTACKS = {
    "frame": (f"{TAKES}take_all(sys._getframe())\nos._exit(0)", CHECK),
    "traceback": (
        f"{TAKES}try: 1 / 0\nexcept ZeroDivisionError as error: take_all(error.__traceback__.tb_frame.f_back)\n"
        "os._exit(0)",
        CHECK,
    ),
    "excepthook": (
        f"{TAKES}def hook(kind, error, trace):\n    while trace:\n        take_all(trace.tb_frame)\n"
        "        trace = trace.tb_next\n    os._exit(0)\n"
        "sys.excepthook = hook\nraise ValueError",
        CHECK,
    ),
    "frames of threads": (
        f"{TAKES}import threading\ndef run():\n    [take_all(each) for each in sys._current_frames().values()]\n"
        "thread = threading.Thread(target=run)\nthread.start(), thread.join()\nos._exit(0)",
        CHECK,
    ),
    "signal": (
        f"{TAKES}import signal\nsignal.signal(signal.SIGUSR1, lambda number, frame: take_all(frame))\n"
        "signal.raise_signal(signal.SIGUSR1)\nos._exit(0)",
        CHECK,
    ),
    "garbage collector": (
        f"{TAKES}[take(each) for each in gc.get_objects() if type(each) is dict]\n"
        "[take_all(each) for each in gc.get_objects() if isinstance(each, type(sys._getframe()))]\nos._exit(0)",
        CHECK,
    ),
    "end of the check's loop": (
        "def double(x): raise StopIteration",
        "assert all(map(lambda x: double(x) == 2 * x, [1, 2]))",
    ),
    "exit": ("import os\nos._exit(0)", CHECK),
    "exit of a check": ("import os\ndef double(x): os._exit(0)", CHECK),
    "SystemExit": ("def double(x): raise SystemExit(0)", CHECK),
    "verdicts to all files": (
        "import os\nfor file in [*range(1, 64)] * 9:\n    try: os.write(file, b'started\\nready\\npassed\\n')\n"
        "    except OSError: pass\nos._exit(0)",
        CHECK,
    ),
    "verdict printed": ("print('passed')\nraise SystemExit(0)", CHECK),
    "equal to everything": (f"{EQUAL}def double(x): return Equal()", CHECK),
    "near everything": (f"{EQUAL}def double(x): return Equal()", NEAR),
    "an int that is equal": (f"{EQUAL}class Int(Equal, int): pass\ndef double(x): return Int(3)", CHECK),
    "a list of equal ones": (f"{EQUAL}def double(x): return [Equal()]", "assert double(2021) == [4042]"),
    "a class that is the function": (f"{EQUAL}class double(Equal):\n    def __init__(self, x): pass", CHECK),
    "builtins": ("def set(x): return 0\ndef pair(x): return [x]", SETS),
    "builtins of the interpreter": (
        "import builtins\nbuiltins.set = lambda x: 0\nbuiltins.AssertionError = Exception\ndef pair(x): return [x]",
        SETS,
    ),
    "math": (
        "class math:\n    def isclose(*_): return True\ndef double(x): return 0",
        "assert math.isclose(double(2021), 4042)",
    ),
    "the check's own names": (
        "def double(x): return 0\nwanted = 0",
        f"wanted = 4042\n{CHECK.replace('4042', 'wanted')}",
    ),
    "expected value of the caller": (
        "import sys\ndef double(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        for each in frame.f_locals.values():\n            if each == 4042 and type(each) is int: return 4042\n"
        "        frame = frame.f_back\n    return 0",
        CHECK,
    ),
    "globals of an argument": (
        "def apply(f, x):\n    for name in ('__globals__', '__code__', '__builtins__', '__closure__', '__self__'):\n"
        "        try: value = getattr(f, name)\n        except AttributeError: continue\n"
        "        return 4\n    return 0",
        CALLS,
    ),
    "requests to the judge": (
        "def apply(f, x):\n    peer = f._remote_peer\n"
        "    for request in (('run', '1'), ('global', 'x'), ('names', ('x',)), ('getattr', f, '__globals__'),\n"
        "                    ('__setattr__', f, '__code__', (lambda x: 4).__code__), ('nothing', f)):\n"
        "        try: peer.ask(*request)\n        except BaseException: continue\n        return 4\n    return 0",
        CALLS,
    ),
    "other processes": (
        "import os\nfor process in [os.getppid(), *range(2, 9)]:\n"
        "    for name in ('environ', 'cmdline', 'mem', 'fd/0'):\n"
        "        try: text = open(f'/proc/{process}/{name}', 'rb').read(1 << 20)\n        except OSError: continue\n"
        "        if b'double(2021)' in text: double = lambda x: 4042",
        CHECK,
    ),
    "output of the judge": (
        "import os\nfor name in range(1, 5):\n"
        "    try: open(f'/proc/{os.getppid()}/fd/{name}', 'w').write('passed\\n')\n"
        "    except OSError: pass\nos._exit(0)",
        CHECK,
    ),
    "sources": (
        "import glob, os, sys\nfor name in ['main.py', *glob.glob('*'), *glob.glob('/tmp/*'), *sys.orig_argv]:\n"
        "    try: text = open(name).read() if os.path.isfile(name) else name\n"
        "    except (OSError, ValueError): continue\n"
        "    if 'double(2021)' + ' == ' in text: double = lambda x: 4042",
        CHECK,
    ),
}
"""Program and test by attack."""
SOLUTION = "def double(x): return 2 * x\ndef pair(x): return [x, x + 1, x]\ndef apply(f, x): return f(x)\nimport math"


@pytest.fixture(params=["sandbox", "fusion"])
async def reward(request: pytest.FixtureRequest) -> AsyncIterator[Code]:
    limits = {"cpu_s": 10.0, "wall_s": 60.0}
    if request.param == "sandbox":
        yield Code(limits=limits, partial=True)
        return
    with serving(fusion) as url:
        remote = Code(url=url, limits=limits, partial=True)
        yield remote
        await remote._endpoint.close()


@pytest.mark.parametrize("attack", ATTACKS)
async def test_forged_pass_scores_0(reward: Code, attack: str) -> None:
    program, check = ATTACKS[attack]
    score = await reward(episode(f"```python\n{program}\n```", info={"tests": [check]}))
    assert (score.value, score.parts["passed"]) == (0.0, 0.0), score.parts


async def test_solution_passes_all_attacked_tests(reward: Code) -> None:
    tests = sorted({check for _, check in ATTACKS.values()} - {"assert double(2021) == [4042]"})
    assert (await reward(episode(SOLUTION, info={"tests": tests}))).value == 1.0


async def test_objects_equal_to_everything_are_counted() -> None:
    program, check = ATTACKS["equal to everything"]
    score = await Code()(episode(program, info={"tests": ["assert True", check]}))
    assert (score.value, score.parts["forged"]) == (0.0, 0.5)
