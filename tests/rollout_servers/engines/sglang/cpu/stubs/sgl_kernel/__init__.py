"""Stands where SGLang's CPU kernels would, which no package index has: SGLang then computes with torch alone.

It imports some kernels by name that a text model without speculative decoding never calls.
"""

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not there: this is the stub for machines without a GPU")

    return absent
