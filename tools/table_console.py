"""Where tables are printed."""

from rich.console import Console


def table_console(*, narrowest: int) -> Console:
    """A console of at least so many columns, because rich cuts off what of a table has no room.

    A terminal that has fewer breaks the lines instead.
    """
    console = Console()
    console.width = max(console.width, narrowest)
    return console
