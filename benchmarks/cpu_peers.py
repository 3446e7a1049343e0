"""lmkit against other engines on this CPU: one model of random weights, the same prompts, threads and contexts.

    python -m benchmarks.cpu_peers [--json FILE] [--plot FILE] [--engines a,b] [--isa a,b] [--rounds N] [--threads N]
                                   [--workdir DIR] [--peer NAME=PYTHON[,PYTHON] ...] [--size 1b|moe|tiny] [--fresh]

Each engine loads once, in a process of its own, in the Python that has it installed. At every point the engines take
turns; the waiting engines are stopped. A measurement is dropped and repeated if others used the cores meanwhile. The
ceilings of the machine are measured before and after each measurement, and a figure above the best of them fails the
run. The measurements are kept in the work folder, and the same command resumes an interrupted run.

An engine that fails is tried again with its next PYTHON, if there is one. The table has the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import psutil
from rich.console import Console

import lmkit
from benchmarks.ceilings import Ceilings, Meter
from benchmarks.contention import REPEATS, Reading
from benchmarks.peers import client, report
from benchmarks.peers.catalog import ENGINES, POINTS, EngineKind, Point, at_levels
from benchmarks.peers.client import EngineFailed, PeerProcess, parse_pythons
from benchmarks.peers.limits import possible
from benchmarks.peers.protocol import Options
from benchmarks.peers.samples import Sample, Samples
from benchmarks.random_llama import LLAMA_1B, MOE_2B, Shape, config, make_checkpoint
from benchmarks.report import save
from lmkit.environment import default_num_threads, environment
from lmkit.errors import ConfigError, LMKitError
from lmkit.jsonfile import read_json
from lmkit.kernels.cpu import isa
from lmkit.kernels.cpu import threads as kernel_threads

PEERS = "benchmarks.peers"  # the package of the engines' modules
MAX_BATCH = max(point.batch for point in POINTS.values())
DECODE_ROOM = 192  # tokens of an answer before its prompt is run again
DECODE_SECONDS = 3.0  # of one measurement; slow engines do fewer steps
WARM_UP, WARM_UP_SECONDS = 64, 5.0  # tokens of a short prompt; most that a whole one may take
PROMPT_SECONDS = 180.0  # an engine that needs longer for the prompts of a point leaves it out
POINT_SECONDS = 20.0  # an engine does no further round of a point after its measurements took so long
MAX_CONTEXT = max(point.prompt_len for point in POINTS.values()) + DECODE_ROOM
CEILING_AGE = 1.0  # seconds after which the ceilings are measured again
CONFIG_BYTES = 1 << 20
SIZES = {
    "1b": replace(LLAMA_1B, max_position=8192),
    "moe": replace(MOE_2B, max_position=8192),
    "tiny": Shape(128, 256, 2, 4, 2, 32, 512, 8192),
    "tiny-moe": Shape(128, 128, 2, 4, 2, 32, 512, 8192, experts=8, experts_per_token=2),
}
console = Console(width=None if sys.stdout.isatty() else 150)


@dataclass
class Engine:
    """One engine of a run. `pythons` are the interpreters that are left to try."""

    kind: EngineKind
    pythons: list[str]
    process: PeerProcess | None = None
    loading: bool = False
    failures: list[str] = field(default_factory=list)
    at: tuple[str, int] = ("", 0)  # (point, tokens of each answer so far)


@dataclass
class Bench:
    """A run in progress."""

    shape: Shape
    threads: int
    rounds: int
    workdir: Path
    samples: Samples
    meter: Meter
    ceilings: Ceilings  # the last that were measured
    measured_at: float = 0.0  # when
    engines: dict[str, Engine] = field(default_factory=dict)

    def start(self, kinds: list[EngineKind], pythons: dict[str, list[str]]) -> None:
        """Make the missing forms of the model and load all engines. A failure is noted and shown."""
        for kind in kinds:
            asked = pythons.get(kind.python or kind.name, [sys.executable])
            having = [python for python in asked if client.can_import(python, kind.packages)]
            if having and kind.is_peer and environment().cpu_isa:
                raise ConfigError("LMKIT_CPU_ISA limits lmkit and the ceilings, but not the peers: use --isa instead")
            if having:
                self.engines[kind.name] = Engine(kind, having)
                self._spawn(kind.name)
            else:
                self.samples.missing[kind.name] = "not installed"
        for name in list(self.engines):
            self._ready(name)

    def _spawn(self, name: str) -> None:
        engine = self.engines[name]
        kind, python = engine.kind, engine.pythons.pop(0)
        log = self.workdir / f"{name}.log"
        model = self.workdir / (kind.form or "checkpoint")
        try:
            if not model.exists():
                console.print(f"{name}: making {model.name}")
                maker = ENGINES.get(kind.maker, kind)
                with_form = python if maker == kind else sys.executable
                client.prepare(with_form, f"{PEERS}.{maker.module}", self.workdir / "checkpoint", model, log)
            options = Options(model, self.threads, MAX_BATCH, MAX_CONTEXT, self.shape.vocab)
            engine.process = PeerProcess(python, f"{PEERS}.{kind.module}", options, log, kind.isa)
            engine.loading = True
        except EngineFailed as error:
            self._fail(name, error)

    def _ready(self, name: str) -> None:
        engine = self.engines[name]
        try:
            if engine.process and engine.loading:
                engine.loading = False
                facts = engine.process.ready()
                note = "".join(f"; a build of its own failed: {reason}" for reason in engine.failures)
                self.samples.facts[name] = asdict(replace(facts, settings=facts.settings + note))
                console.print(f"{name} {facts.version}: {facts.settings}{note}", markup=False)
        except EngineFailed as error:
            self._fail(name, error)

    def run(self, points: list[Point]) -> None:
        """Measure point by point, round by round, engine by engine. The second time is for those that had to be started
        again."""
        for point in [*points, *points]:
            before = self.samples.num_taken()
            for number in range(1, self.rounds + 1):
                for name in self.engines:
                    if self._wants(name, point, number):
                        self._measure(name, point)
            if self.samples.num_taken() > before:
                console.print(f"{point.name}: " + ", ".join(self._summary(name, point) for name in self.engines))

    def close(self) -> None:
        for engine in self.engines.values():
            if engine.process:
                engine.process.close()

    def _wants(self, name: str, point: Point, number: int) -> bool:
        """Whether engine `name` still has to do round `number` of a point."""
        process = self.engines[name].process
        if process is None or (point.small_kv and process.facts.kv_bytes >= 2):
            return False
        prompts = self.samples.rate(name, "prefill512")
        if prompts and point.prompt_tokens / prompts > PROMPT_SECONDS:
            return False
        done = len(self.samples.of(name, point.name))
        clean = self.samples.num_clean(name, point.name)
        enough = clean >= number or done >= number + REPEATS
        return not enough and (not done or self.samples.seconds(name, point.name) < POINT_SECONDS)

    def _measure(self, name: str, point: Point) -> None:
        """Measure until there is one clean sample, or as many disturbed ones as are allowed."""
        try:
            for _ in range(1 + REPEATS):
                sample = self._sample(name, point)
                self.samples.add(name, point.name, sample)
                if sample.clean or self.samples.seconds(name, point.name) > POINT_SECONDS:
                    break
        except EngineFailed as error:
            self._fail(name, error)

    def _sample(self, name: str, point: Point) -> Sample:
        engine = self.engines[name]
        peer = engine.process
        assert peer
        self._be_ready(engine, peer, point)
        if time.perf_counter() - self.measured_at > CEILING_AGE:
            self._measure_ceilings()
        earlier = self.ceilings
        processes = [psutil.Process(), peer.usage()]
        before = Reading.take(processes)
        if point.steps:
            answer = peer.ask(do="decode", steps=point.steps, limit=DECODE_SECONDS)
        else:
            answer = peer.ask(do="prefill", batch=point.batch, prompt_len=point.prompt_len)
        after = Reading.take(processes)
        engine.at = point.name, engine.at[1] + point.steps + 1
        self._measure_ceilings()
        return Sample(
            answer.get("tokens", point.prompt_tokens) / answer["seconds"],
            before.others_until(after, psutil.cpu_count() or 1),
            after.clock - before.clock,
            possible(earlier.best(self.ceilings), self.shape, peer.facts, point),
        )

    def _measure_ceilings(self) -> None:
        """Measure the ceilings, while all engines are stopped."""
        self.ceilings, _ = self.meter.measure()
        self.measured_at = time.perf_counter()
        self.samples.ceilings.append(asdict(self.ceilings))

    def _be_ready(self, engine: Engine, peer: PeerProcess, point: Point) -> None:
        """Prepare a measurement. For decoding, run the prompts of the point. For a prompt, run a short one to warm up,
        and then one like it if that does not take long."""
        place, used = engine.at
        if place == point.name and used + point.steps + 1 <= DECODE_ROOM:
            return
        if point.steps:
            peer.ask(do="prefill", batch=point.batch, prompt_len=point.prompt_len)
        elif place != point.name:
            seconds = peer.ask(do="prefill", batch=point.batch, prompt_len=WARM_UP)["seconds"]
            if seconds * point.prompt_len / WARM_UP < WARM_UP_SECONDS:
                peer.ask(do="prefill", batch=point.batch, prompt_len=point.prompt_len)
        engine.at = point.name, 0

    def _fail(self, name: str, error: EngineFailed) -> None:
        """Start the engine with its next interpreter. Without one, keep its measurements and the reason."""
        console.print(f"{name} failed: {error} (see {self.workdir / name}.log)", markup=False)
        engine = self.engines[name]
        engine.failures.append(str(error))
        if engine.process:
            engine.process.close()
            engine.process = None
        if engine.pythons:
            self.samples.taken.pop(name, None)
            engine.at = "", 0
            self._spawn(name)
            self._ready(name)
        else:
            self.samples.missing[name] = f"failed: {error}"

    def _summary(self, name: str, point: Point) -> str:
        rate = self.samples.rate(name, point.name)
        return f"{name} {rate:.1f}" if rate is not None else f"{name} -"


def run(
    kinds: list[EngineKind],
    pythons: dict[str, list[str]],
    *,
    size: str = "1b",
    rounds: int = 2,
    threads: int,
    workdir: Path,
    points: list[Point],
    fresh: bool = False,
) -> Samples:
    """Measure `kinds` at `points`. `pythons`: interpreters of an engine, if not this one."""
    shape, folder = SIZES[size], workdir / size
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"size": size, "threads": threads, "rounds": rounds, "lmkit": lmkit.__version__}
    samples = Samples.open(folder / "samples.json", settings, fresh=fresh)
    if samples.taken:
        console.print(f"taking up a run with {samples.num_taken()} measurements; --fresh starts anew")
    _make_checkpoint(folder / "checkpoint", shape)
    kernel_threads.configure(threads)
    # A part of the weights may stay in a large cache from one step to the next. As many bytes as 4-bit weights are read
    # at once, so that a ceiling profits in the same way.
    meter = Meter(shape.num_linear // 2)
    ceilings, rates = meter.measure(0.5 if size == "tiny" else 5.0)
    meter.keep_fastest(rates)
    samples.ceilings.append(asdict(ceilings))
    bench = Bench(shape, threads, rounds, folder, samples, meter, ceilings)
    with contextlib.closing(bench):
        bench.start(kinds, pythons)
        bench.run(points)
    samples.save()
    return samples


def _make_checkpoint(folder: Path, shape: Shape) -> None:
    """Raises ConfigError if there is a model of another shape."""
    if not folder.exists():
        console.print(f"making a Llama of {shape.num_parameters / 1e9:.2f}B random weights in {folder}")
        make_checkpoint(folder, shape)
    stored, wanted = read_json(folder / "config.json", CONFIG_BYTES), config(shape)
    if any(stored.get(name) != wanted[name] for name in ("hidden_size", "vocab_size", "max_position_embeddings")):
        raise ConfigError(f"{folder} has a model of another shape: remove {folder.parent}, or name another --workdir")


def main() -> None:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no engine outlives the run
    try:
        kinds = at_levels([ENGINES[name] for name in parse_engines(arguments.engines)], parse_levels(arguments.isa))
        samples = run(
            kinds,
            parse_pythons(arguments.peer, {kind.python or kind.name for kind in ENGINES.values()}),
            size=arguments.size,
            rounds=arguments.rounds,
            threads=arguments.threads,
            workdir=arguments.workdir,
            points=parse_points(arguments.points),
            fresh=arguments.fresh,
        )
        points = parse_points(arguments.points)
        console.print(report.table(samples, kinds, points, SIZES[arguments.size], arguments.threads))
        console.print(report.engines(samples, kinds))
        rows = report.rows(samples, SIZES[arguments.size])
    except LMKitError as error:
        sys.exit(f"error: {error}")
    if arguments.json:
        about = {"missing": samples.missing, "engines": samples.facts, "ceilings": asdict(samples.best_ceilings())}
        save(arguments.json, "cpu_peers", rows, **about | {"threads": arguments.threads})
    if arguments.plot:
        report.plot(samples, kinds, points, arguments.plot)
    samples.path.unlink()  # complete: the next run measures anew


def parse_engines(text: str | None) -> list[str]:
    """`a,b` -> names, in the catalog's order. Raises ConfigError."""
    return _parse("--engines", "engine", text, ENGINES)


def parse_points(text: str | None) -> list[Point]:
    """`a,b` -> points. Raises ConfigError."""
    return [POINTS[name] for name in _parse("--points", "point", text, POINTS)]


def parse_levels(text: str | None) -> list[str]:
    """`a,b` -> instruction set levels of this machine. Raises ConfigError."""
    levels = _parse("--isa", "level", text, isa.LEVELS) if text else []
    for level in levels:
        if reason := isa.obstacle(isa.LEVELS[level]):
            raise ConfigError(f"--isa {level}: {reason}")
    return levels


def _parse(option: str, noun: str, text: str | None, known: Collection[str]) -> list[str]:
    asked = set(text.split(",")) if text else set(known)
    if unknown := sorted(asked - set(known)):
        raise ConfigError(f"{option}: no {noun} {', '.join(unknown)}; there are {', '.join(known)}")
    return [name for name in known if name in asked]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--plot", type=Path, help="also draw them into this PNG file")
    parser.add_argument("--engines", help=f"only these, separated by commas: {','.join(ENGINES)}")
    parser.add_argument("--points", help=f"only these: {','.join(POINTS)}")
    parser.add_argument("--isa", help=f"also run lmkit at these levels of this machine: {','.join(isa.LEVELS)}")
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each engine at each point")
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--workdir", type=Path, default=Path("build/cpu_peers"), help="for models and samples: 7 GB")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PYTHON[,PYTHON]",
        help="the Python that has NAME, and others to try when the engine fails in it",
    )
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--fresh", action="store_true", help="do not take up an interrupted run")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.threads < 1:
        parser.error("--rounds and --threads are at least 1")
    return arguments


if __name__ == "__main__":
    main()
