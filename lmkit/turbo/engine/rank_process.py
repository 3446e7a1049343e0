"""The process of one rank or stage of an engine, except the first (turbo.runners.ranks, turbo.runners.stages).

    python -m lmkit.turbo.engine.rank_process < plans
    python -m lmkit.turbo.engine.rank_process HOST:PORT < key        of an engine on another machine (runners.remote)

It says `ready`, or why it cannot start, in one line on stdout. It ends with the engine, because its stdin is a pipe
that only the engine holds.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from typing import TYPE_CHECKING

import msgspec

from lmkit import log
from lmkit.environment import calm_openmp, environment
from lmkit.errors import LMKitError

if TYPE_CHECKING:
    from lmkit.turbo.adapters import AdapterRead
    from lmkit.turbo.runners.device import EngineDevice


def _end_with_parent() -> None:
    """End when the other end of stdin is closed, even in the middle of a step."""

    def watch() -> None:
        poll = select.poll()
        poll.register(0, select.POLLRDHUP)  # only the end is reported, of a pipe or a connection
        poll.poll()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def _tell(line: str) -> None:
    """Tell the engine a line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _say(read: AdapterRead) -> None:
    """Say it to the engine, see Processes.hear_adapters."""
    from lmkit.turbo.runners.processes import ADAPTER

    _tell((ADAPTER + msgspec.json.encode(read)).decode())


def main(device: EngineDevice | None = None) -> int:
    """Run a rank. `device`: another one than the configuration names."""
    calm_openmp()
    log.setup("WARNING" if environment().log_level == "INFO" else environment().log_level, process="rank")
    if len(sys.argv) > 1:
        from lmkit.turbo.runners.remote import enter

        connection = enter(sys.argv[1], sys.stdin.read())
        os.dup2(connection.fileno(), 0)
        os.dup2(connection.fileno(), 1)
    _end_with_parent()
    from lmkit import cores
    from lmkit.kernels.cpu import threads
    from lmkit.models import kv_storage
    from lmkit.turbo.changes import Change, ImageChange
    from lmkit.turbo.engine import loading
    from lmkit.turbo.engine.adapters import RankAdapters
    from lmkit.turbo.kv.blocks import KVBlocks
    from lmkit.turbo.no_memory import finds_memory
    from lmkit.turbo.runners.devices import ENGINE_DEVICES
    from lmkit.turbo.runners.guides import Guides
    from lmkit.turbo.runners.images import EncodedImages
    from lmkit.turbo.runners.processes import Start, read
    from lmkit.turbo.runners.runner import RunnerParts

    pipe = open(0, "rb", closefd=False)  # noqa: SIM115 - for as long as the process runs
    start = read(pipe, Start)
    os.chdir(start.folder)
    config = start.config
    device = device or ENGINE_DEVICES[config.device]()
    assert config.num_threads is not None
    cores.bind(start.cpus)
    threads.configure(config.num_threads)
    with device.settings(config):
        try:
            model = loading.load(start.model_path, config, device, start.rank)
            spec, plan = model.decoder.spec, model.memory
            with finds_memory("the KV cache"):
                slots = config.sequences_per_step
                kv = kv_storage.allocate(
                    spec.layers,
                    model.storages,
                    plan.num_blocks,
                    config.tokens_per_block,
                    plan.max_model_len,
                    device.name,
                    plan.layout,
                    start.num_states,
                    (slots, config.num_draft_tokens),
                )
            kv = [kv[layer.index] for layer in model.decoder.layers]
            adapters = RankAdapters(loading.load_adapters(model, config), start.rank, _say)
            images = EncodedImages.of(config.image_memory, spec)
            parts = RunnerParts(
                config,
                model.decoder,
                kv,
                KVBlocks(kv),
                None,
                Guides(None, spec.vocab_size),
                plan.max_model_len,
                plan.workspace,
                len(plan.layout.groups),
                images,
            )
            runner = device.following(parts, start, pipe, _tell)
        except LMKitError as error:
            _tell(str(error))
            return 2
        if device.first_steps_wait:
            _tell("ready")
        runner.warm_up()
        if not device.first_steps_wait:
            _tell("ready")

        def carry_out(change: Change) -> None:
            if isinstance(change, ImageChange):
                images.change(change, model.decoder.at)
            else:
                adapters.change(change)

        runner.run(carry_out)
        return 0


if __name__ == "__main__":
    sys.exit(main())
