"""A progress bar on stderr for the prompts of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lmkit.api.response import Response


@contextmanager
def progress_bar(count: int, shown: bool) -> Iterator[Callable[[Response], None]]:
    """Yield a function that takes every part of the answers. The bar counts the answers that have ended."""
    if not shown:
        yield lambda part: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    speed_column = TextColumn("{task.fields[speed]}")
    with Progress(
        TextColumn("prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        speed_column,
        console=Console(stderr=True),
    ) as bar:
        task, tokens = bar.add_task("", total=count, speed=""), 0

        def advance(part: Response) -> None:
            nonlocal tokens
            tokens += len(part.token_ids)
            speed = f"{tokens / max(bar.tasks[0].elapsed or 0.0, 1e-3):.0f} tokens/s"
            bar.update(task, advance=part.finish_reason is not None, speed=speed)

        yield advance
