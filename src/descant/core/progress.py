"""The progress bar of long work."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def progress_bar(disable: bool) -> Progress:
    """The progress bar of long work."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[summary]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),  # it is for people; stdout is for answers
        disable=disable,
        transient=True,
    )
