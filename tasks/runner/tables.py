"""Tables of `results` on a terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from results.tables import Table

REDIRECTED_WIDTH = 120  # columns


def make_console() -> Console:
    """Return a console; where output is redirected, one wide enough that tables are not cut."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=REDIRECTED_WIDTH)


def print_table(console: Console, table: Table) -> None:
    """Print a table with its notes below it; the first column is text, the others are numbers."""
    rich = RichTable(
        title=table.title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
    )
    for index, column in enumerate(table.columns):
        rich.add_column(column.title, justify="right" if index else "left", no_wrap=index > 0)
    for row in table.text_rows():
        rich.add_row(*row)
    console.print()
    console.print(rich)
    for note in table.notes:
        console.print(f"[dim]{note}[/dim]")
    console.print()
