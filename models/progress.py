"""A progress bar for work that turns out to be slow."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

_PATIENCE = 1.0  # seconds before a bar appears


@contextlib.contextmanager
def progress_bar(label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with every count of bytes done.

    The bar is drawn on stderr, only if that is a terminal, and only after a second.
    """
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(label, total=total_bytes)
    appears = time.monotonic() + _PATIENCE

    def advance(count: int) -> None:
        bar.update(task, advance=count)
        if time.monotonic() > appears:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()
