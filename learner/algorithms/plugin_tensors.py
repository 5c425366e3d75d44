"""Whether a user's own loss or advantage has given what the learner goes on with.

# B rows (answers), T actions of the longest
"""

from torch import Tensor

from slipstream.configs.runtime.errors import ConfigError


def require_shape(plugin: str, what: str, given: object, mask_BT: Tensor) -> None:
    """Another shape may well broadcast, and train something else.

    Args:
        plugin: its kind and name.
        what: the thing that it gave.

    Raises: ConfigError if it is no tensor of the mask's shape.
    """
    if not isinstance(given, Tensor):
        raise ConfigError(f"{plugin} gave {what} as {type(given).__name__}, not as a tensor")
    if given.shape != mask_BT.shape:
        raise ConfigError(
            f"{plugin} gave {what} of shape {list(given.shape)}; here it must be [B, T] = {list(mask_BT.shape)}, a "
            "number for each action"
        )
