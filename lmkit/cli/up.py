"""`lmkit up`: a proxy and its replicas, as a file describes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmkit.garbage import search_rarely

if TYPE_CHECKING:
    from lmkit.cluster.config import ClusterConfig


def up(
    file: Annotated[Path, typer.Argument(help="A YAML file of models and their replicas, see docs/cluster.md.")],
    check: Annotated[bool, typer.Option("--check", help="Only check the file.")] = False,
) -> None:
    """Start a proxy and replicas, and keep them running. A changed file is taken over; SIGTERM drains them.

    Needs nothing but this machine. With `ray` in the file the replicas run on a Ray cluster.
    """
    search_rarely()
    import asyncio

    from lmkit import log
    from lmkit.cluster.cluster import Cluster
    from lmkit.cluster.config import read
    from lmkit.cluster.processes import check_options
    from lmkit.web.running import registered

    def load() -> ClusterConfig:
        config = read(file)
        for group in config.models:
            check_options({"model": group.model, **group.options}, f"{file}: {group.label}")
        return config

    config = load()
    if check:
        print(f"{file}: {', '.join(group.label for group in config.models)}")
        return
    log.setup(config.proxy.log_level, log_format=config.proxy.log_format)
    drain_seconds = config.proxy.drain_seconds + config.drain_seconds
    with registered("up", ",".join(dict.fromkeys(group.called for group in config.models)), drain_seconds) as tell:

        def on_ready(url: str) -> None:
            tell(url)
            print(f"cluster on {url}", flush=True)

        def say(id: str, line: str) -> None:
            print(f"{id} | {line}", flush=True)

        async def run() -> None:
            await Cluster(load, file, say, on_ready).run()

        asyncio.run(run())
