"""A judge and the program that it judges as one program and its input, for servers that run one program."""

import types
from pathlib import Path
from typing import Final

from slipstream.sandbox.checks import Check
from slipstream.sandbox.inside import answer, judge, remote, whole, wire


def _loader(*modules: types.ModuleType) -> str:
    sources = [(module.__name__, Path(str(module.__file__)).read_text(encoding="utf-8")) for module in modules]
    return f"""import sys
for name, source in {sources!r}:
    sys.modules[name] = module = type(sys)(name)
    exec(compile(source, name, "exec", dont_inherit=True), vars(module))
"""


_PROGRAM: Final = _loader(wire, remote, answer) + "del name, source\nmodule.main(None, int(sys.argv[1]))\n"
JUDGE: Final = _loader(wire, remote, judge, whole) + f"module.main({_PROGRAM!r})\n"
"""The program: the same for all checks, because whatever runs on that server may read it."""


def judge_input(token: str, program: str, imports: str, check: Check) -> str:
    """The judge's stdin. Its last line of output is the token and the outcome, as `inside/judge.py` names it."""
    return repr((token, (program, imports, ((check.source, check.names, check.modules),))))
