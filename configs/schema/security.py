"""Who may take part in a run."""

from slipstream.configs.schema.base import Section, UserPath


class SecurityConfig(Section):
    """Encryption and authentication of the ZeroMQ sockets. Redis has its own: `redis.url`, `redis.ca_file`."""

    keys: UserPath | None = None
    """Folder with this host's CURVE keys, made by `slipstream keys new`; unset: plain text, for loopback only."""
