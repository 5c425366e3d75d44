"""How many files and connections a process may hold open."""

import resource


def open_files_as_allowed() -> None:
    """Raises this process's limit of open files as far as it may.

    A buffer takes three for each rollout server, an engine's server one for each sample; 1,024 is a common limit.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
