"""lmkit against other engines on this CPU: one model of random weights, the same prompts, threads and contexts.

    python -m benchmarks.cpu_peers [--json FILE] [--plot FILE] [--engines a,b] [--rounds N] [--threads N]
                                   [--workdir DIR] [--peer NAME=PYTHON ...] [--size 1b|tiny] [--fresh]

Each engine loads once, in a process of its own, in the Python that has it installed. At every point the engines take
turns; the waiting engines are stopped. A measurement is dropped and repeated if others used the cores meanwhile. The
measurements are kept in the work folder, and the same command resumes an interrupted run.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from rich.console import Console

import lmkit
from benchmarks.ceilings import Ceilings, measure_ceilings
from benchmarks.contention import REPEATS, Reading
from benchmarks.peers import client, report
from benchmarks.peers.catalog import ENGINES, POINTS, EngineKind, Point
from benchmarks.peers.client import EngineFailed, PeerProcess, parse_pythons
from benchmarks.peers.protocol import Options
from benchmarks.peers.samples import Sample, Samples
from benchmarks.random_llama import LLAMA_1B, Shape, make_checkpoint
from benchmarks.report import save
from lmkit.config import default_num_threads
from lmkit.errors import ConfigError, LMKitError
from lmkit.kernels.cpu import threads as kernel_threads

MAX_BATCH, MAX_CONTEXT = 64, 768  # a context of 256 at most while decoding
DECODE_ROOM = 192  # tokens of an answer before its prompt is run again
DECODE_SECONDS = 3.0  # of one measurement; slow engines do fewer steps
POINT_SECONDS = 20.0  # an engine does no further round of a point after its measurements took so long
SIZES = {"1b": LLAMA_1B, "tiny": Shape(128, 256, 2, 4, 2, 32, 512, 1024)}
console = Console(width=None if sys.stdout.isatty() else 150)


@dataclass
class Bench:
    """A run in progress."""

    shape: Shape
    threads: int
    rounds: int
    workdir: Path
    samples: Samples
    peers: dict[str, PeerProcess] = field(default_factory=dict)
    at: dict[str, tuple[str, int]] = field(default_factory=dict)  # engine -> (point, tokens of each answer so far)

    def start(self, kinds: list[EngineKind], pythons: dict[str, str]) -> None:
        """Make the missing forms of the model and load all engines. A failure is noted and shown."""
        for kind in kinds:
            python = pythons.get(kind.name, sys.executable)
            if client.can_import(python, kind.packages):
                self._spawn(kind, python)
            else:
                self.samples.missing[kind.name] = "not installed"
        for name, peer in list(self.peers.items()):
            try:
                peer.ready()
            except EngineFailed as error:
                self._fail(name, error)
                continue
            self.samples.facts[name] = asdict(peer.facts)
            console.print(f"{name} {peer.facts.version}: {peer.facts.settings}")

    def _spawn(self, kind: EngineKind, python: str) -> None:
        module, log = f"benchmarks.peers.{kind.module}", self.workdir / f"{kind.name}.log"
        model = self.workdir / (kind.form or "checkpoint")
        try:
            if not model.exists():
                console.print(f"{kind.name}: making {model.name}")
                client.prepare(python, module, self.workdir / "checkpoint", model, log)
            options = Options(model, self.threads, MAX_BATCH, MAX_CONTEXT, self.shape.vocab)
            self.peers[kind.name] = PeerProcess(python, module, options, log)
        except EngineFailed as error:
            self._fail(kind.name, error)

    def run(self, points: list[Point]) -> None:
        """Measure point by point, round by round, engine by engine."""
        for point in points:
            for number in range(1, self.rounds + 1):
                for name in list(self.peers):
                    if self._wants(name, point, number):
                        self._measure(name, point)
            console.print(f"{point.name}: " + ", ".join(self._summary(name, point) for name in self.peers))

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()

    def _wants(self, name: str, point: Point, number: int) -> bool:
        """Whether engine `name` still has to do round `number` of a point."""
        done = len(self.samples.of(name, point.name))
        clean = self.samples.num_clean(name, point.name)
        enough = clean >= number or done >= number + REPEATS
        return not enough and (not done or self.samples.seconds(name, point.name) < POINT_SECONDS)

    def _measure(self, name: str, point: Point) -> None:
        """Measure until there is one clean sample, or as many disturbed ones as are allowed."""
        try:
            for _ in range(1 + REPEATS):
                sample = self._sample(self.peers[name], name, point)
                self.samples.add(name, point.name, sample)
                if sample.clean or self.samples.seconds(name, point.name) > POINT_SECONDS:
                    break
        except EngineFailed as error:
            self._fail(name, error)

    def _sample(self, peer: PeerProcess, name: str, point: Point) -> Sample:
        self._be_ready(peer, name, point)
        processes = [psutil.Process(), peer.usage()]
        before = Reading.take(processes)
        if point.steps:
            answer = peer.ask(do="decode", steps=point.steps, limit=DECODE_SECONDS)
        else:
            answer = peer.ask(do="prefill", batch=point.batch, prompt_len=point.prompt_len)
        after = Reading.take(processes)
        place, used = self.at[name]
        self.at[name] = place, used + point.steps + 1
        return Sample(
            answer.get("tokens", point.prompt_tokens) / answer["seconds"],
            before.others_until(after, psutil.cpu_count() or 1),
            after.clock - before.clock,
        )

    def _be_ready(self, peer: PeerProcess, name: str, point: Point) -> None:
        """Prepare a measurement. For decoding, run the prompts of the point. For a prompt, run it once to warm up."""
        place, used = self.at.get(name, ("", 0))
        if place == point.name and used + point.steps + 1 <= DECODE_ROOM:
            return
        if point.steps or place != point.name:
            length = point.prompt_len if point.steps else 64  # a slow engine's warm-up should be short
            seconds = peer.ask(do="prefill", batch=point.batch, prompt_len=length)["seconds"]
            if not point.steps and seconds < 5:
                peer.ask(do="prefill", batch=point.batch, prompt_len=point.prompt_len)
        self.at[name] = point.name, 0

    def _fail(self, name: str, error: EngineFailed) -> None:
        self.samples.missing[name] = "failed"
        console.print(f"{name} failed: {error} (see {self.workdir / name}.log)", markup=False)
        self.samples.taken.pop(name, None)
        if peer := self.peers.pop(name, None):
            peer.close()

    def _summary(self, name: str, point: Point) -> str:
        rate = self.samples.rate(name, point.name)
        return f"{name} {rate:.1f}" if rate is not None else f"{name} -"


def run(
    kinds: list[EngineKind],
    pythons: dict[str, str],
    *,
    size: str = "1b",
    rounds: int = 3,
    threads: int,
    workdir: Path,
    points: list[Point] | None = None,
    fresh: bool = False,
) -> tuple[Samples, Ceilings]:
    """Measure `kinds` at `points` (all points if None). `pythons`: interpreter of an engine, if not this one."""
    shape, points = SIZES[size], points or list(POINTS.values())
    folder = workdir / size
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"size": size, "threads": threads, "rounds": rounds, "lmkit": lmkit.__version__}
    samples = Samples.open(folder / "samples.json", settings, fresh=fresh)
    if samples.taken:
        console.print(f"taking up a run with {samples.num_taken()} measurements; --fresh starts anew")
    if not (folder / "checkpoint").exists():
        console.print(f"making a Llama of {shape.num_parameters / 1e9:.2f}B random weights in {folder}")
        make_checkpoint(folder / "checkpoint", shape)
    kernel_threads.configure(threads)
    ceilings = Ceilings(**samples.ceilings) if samples.ceilings else measure_ceilings(0.5 if size == "tiny" else 5)
    samples.ceilings = asdict(ceilings)
    bench = Bench(shape, threads, rounds, folder, samples)
    with contextlib.closing(bench):
        bench.start(kinds, pythons)
        bench.run(points)
    samples.save()
    return samples, ceilings


def main() -> None:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no engine outlives the run
    try:
        names, pythons = parse_engines(arguments.engines), parse_pythons(arguments.peer, ENGINES)
        samples, ceilings = run(
            [ENGINES[name] for name in names],
            pythons,
            size=arguments.size,
            rounds=arguments.rounds,
            threads=arguments.threads,
            workdir=arguments.workdir,
            fresh=arguments.fresh,
        )
        points, num_linear = list(POINTS.values()), SIZES[arguments.size].num_linear
        console.print(report.table(samples, points, ceilings, num_linear, arguments.threads))
    except LMKitError as error:
        sys.exit(f"error: {error}")
    if arguments.json:
        missing = {"missing": samples.missing, "engines": samples.facts, "ceilings": asdict(ceilings)}
        save(arguments.json, "cpu_peers", samples.rows(), **missing | {"threads": arguments.threads})
    if arguments.plot:
        report.plot(samples, points, arguments.plot)
    samples.path.unlink()  # complete: the next run measures anew


def parse_engines(text: str | None) -> list[str]:
    """`a,b` -> names, in the catalog's order. Raises ConfigError."""
    asked = set(text.split(",")) if text else set(ENGINES)
    if unknown := sorted(asked - set(ENGINES)):
        raise ConfigError(f"--engines: no engine {', '.join(unknown)}; there are {', '.join(ENGINES)}")
    return [name for name in ENGINES if name in asked]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--plot", type=Path, help="also draw them into this PNG file")
    parser.add_argument("--engines", help=f"only these, separated by commas: {','.join(ENGINES)}")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each engine at each point")
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--workdir", type=Path, default=Path("build/cpu_peers"), help="for models and samples: 7 GB")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="the Python that has NAME")
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--fresh", action="store_true", help="do not take up an interrupted run")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.threads < 1:
        parser.error("--rounds and --threads are at least 1")
    return arguments


if __name__ == "__main__":
    main()
