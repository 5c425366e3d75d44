"""Whether the ranks of a learner mean to do the same: each reads a configuration of its own."""

from slipstream.buffer.identity import difference
from slipstream.configs import RunConfig, agreement
from slipstream.configs.errors import ConfigError
from slipstream.learner.distributed import World


def require_same_settings(config: RunConfig, world: World) -> None:
    """Ranks that differ would wait for each other for ever, or train each its part of the weights in another way.

    Raises: ConfigError, on all ranks, when one has other settings than rank 0.
    """
    said = world.gather(agreement.of_rank(config))
    for rank, settings in enumerate(said):
        found = difference(settings, said[0], "on rank 0")
        if found is not None:
            raise ConfigError(f"learner rank {rank}: {found}; give all ranks the same configuration")
