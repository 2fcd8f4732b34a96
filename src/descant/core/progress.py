"""Progress bars on stderr."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def progress_bar(disable: bool) -> Progress:
    """Return a progress bar; each of its tasks has a field ``summary``."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[summary]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),  # stdout is for results
        disable=disable,
        transient=True,
    )
