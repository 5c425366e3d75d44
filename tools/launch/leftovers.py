"""Removal of what killed processes have left: segments in shared memory, and temporary files."""

from slipstream.buffer.wire.weights.layout import sweep
from slipstream.configs.runtime.temporary import remove_leftovers

if __name__ == "__main__":
    remove_leftovers()
    sweep()
