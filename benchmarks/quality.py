"""The quality loss of a 4-bit model, by tool: one model, the same calibration rows, the same bits, one evaluator.

    python -m benchmarks.quality [--json FILE] [--plot FILE] [--tools a,b/recipe] [--outliers 1,30] [--threads N]
                                 [--workdir DIR] [--peer NAME=PYTHON ...] [--model DIR] [--quick] [--fresh]
                                 [--group-size N] [--rows N] [--calibration TEXT] [--text FILE] [--eval-tokens N]

The model is the demo model as it is, and with outlier channels that leave its function alone (outliers.py). With
`--model` it is another one with the demo model's tokenizer (`--outliers 1` for a mixture of experts). Each tool
quantizes it in a process of its own, in the Python that has the tool installed. lmkit then measures the KL divergence
from the original on held-out text, with exact activations. The results are kept in the work folder. The same command
resumes an interrupted run, and commands with other --tools or --outliers add to one table.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from benchmarks.peers.client import can_import, environment, last_line, parse_pythons
from benchmarks.quality_peers import cases, report
from benchmarks.quality_peers.cases import Setting
from benchmarks.quality_peers.catalog import ENTRIES, OUTLIERS, TOOLS, Entry
from benchmarks.quality_peers.protocol import FACTS, Job
from benchmarks.quality_peers.results import Results, Row
from benchmarks.report import save
from lmkit.environment import default_num_threads
from lmkit.errors import ConfigError, LMKitError
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.kernels.cpu import threads as kernel_threads

FULL, QUICK = Setting(num_rows=64, seq_len=512, eval_tokens=32768), Setting(num_rows=8, seq_len=512, eval_tokens=4096)
console = Console(width=None if sys.stdout.isatty() else 150)


class ToolFailed(Exception):
    """A tool's process ended with an error. The message is the last line that it wrote."""


def run(
    entries: list[Entry],
    outliers: list[int],
    pythons: dict[str, list[str]],
    *,
    setting: Setting,
    threads: int,
    workdir: Path,
    original: Path = DEMO_FOLDER,
    fresh: bool = False,
) -> Results:
    """Measure the entries that have no result yet. `pythons`: interpreter of a tool, if not this one."""
    results = Results.open(workdir / "results.json", asdict(setting) | {"threads": threads}, fresh=fresh)
    kernel_threads.configure(threads)
    rows = cases.write_rows(workdir, setting, original)
    for factor in outliers:
        wanted = [entry for entry in entries if not results.has(entry, factor)]
        model = cases.make_model(workdir, factor, original) if wanted else workdir
        for entry in wanted:
            python, *_ = pythons.get(entry.tool, [sys.executable])
            if not can_import(python, TOOLS[entry.tool].packages):
                results.missing[entry.name] = "not installed"
                continue
            out = workdir / f"{entry.tool}-{entry.recipe}-x{factor}"
            job = Job(str(model), str(rows), str(out), entry.recipe, threads, setting.group_size, setting.dataset)
            try:
                _quantize(python, TOOLS[entry.tool].module, job)
                row = _measure(entry, factor, job, setting, original)
            except (ToolFailed, LMKitError) as error:
                results.missing[entry.name] = "failed"
                console.print(f"{entry.name} x{factor} failed: {error} (see {out}.log)", markup=False)
                continue
            results.add(row)
            console.print(f"{entry.name} x{factor}: KL {row.kl:.5f}, {row.seconds:.0f} s")
    return results


def _quantize(python: str, module: str, job: Job) -> None:
    """Run a tool on a job, in a new folder. Raises ToolFailed."""
    out = Path(job.out)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / "job.json").write_text(json.dumps(asdict(job)))
    command = [python, "-m", f"benchmarks.quality_peers.{module}", str(out / "job.json")]
    log = Path(f"{job.out}.log")
    with log.open("wb") as output:
        # The tool runs in its own folder, because some tools leave files where they run.
        done = subprocess.run(command, stdout=output, stderr=output, cwd=out, env=environment(job.threads), check=False)
    if done.returncode:
        raise ToolFailed(last_line(log))


def _measure(entry: Entry, factor: int, job: Job, setting: Setting, original: Path) -> Row:
    facts = json.loads((Path(job.out) / FACTS).read_text())
    result = cases.evaluate_against(job.dense if job.dense.exists() else job.checkpoint, Path(job.model), setting)
    assert result.divergence is not None
    bits = facts.pop("bits") or cases.bits_per_weight(job.checkpoint, original)
    return Row(
        tool=entry.tool,
        recipe=entry.recipe,
        outliers=factor,
        kl=result.divergence.kl_mean,
        perplexity=result.perplexity,
        reference_perplexity=result.divergence.reference_perplexity,
        same_top=result.divergence.same_top,
        bits=bits,
        **facts,
    )


def main() -> None:
    arguments = _arguments()
    try:
        entries = parse_entries(arguments.tools)
        outliers = parse_outliers(arguments.outliers)
        results = run(
            entries,
            outliers,
            parse_pythons(arguments.peer, TOOLS),
            setting=_setting(arguments),
            threads=arguments.threads,
            workdir=arguments.workdir.resolve() / ("quick" if arguments.quick else "full"),
            original=arguments.model.resolve(),
            fresh=arguments.fresh,
        )
    except LMKitError as error:
        sys.exit(f"error: {error}")
    console.print(report.table(results))
    if arguments.json:
        rows = [asdict(row) for row in results.rows]
        save(arguments.json, "quality", rows, missing=results.missing, **results.settings)
    if arguments.plot:
        report.plot(results, arguments.plot)


def _setting(arguments: argparse.Namespace) -> Setting:
    """What the options change of the usual amounts."""
    given = {
        "group_size": arguments.group_size,
        "num_rows": arguments.rows,
        "dataset": arguments.calibration,
        "text": None if arguments.text is None else str(arguments.text.resolve()),
        "eval_tokens": arguments.eval_tokens,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    return replace(QUICK if arguments.quick else FULL, **changes)


def parse_entries(text: str | None) -> list[Entry]:
    """`lmkit,llm-compressor/awq` -> entries, in the catalog's order. Raises ConfigError."""
    asked = set(text.split(",")) if text else set(TOOLS)
    if unknown := sorted(asked - set(TOOLS) - {entry.name for entry in ENTRIES}):
        known = ", ".join(entry.name for entry in ENTRIES)
        raise ConfigError(f"--tools: no tool {', '.join(unknown)}; there are {', '.join(TOOLS)} and {known}")
    return [entry for entry in ENTRIES if entry.tool in asked or entry.name in asked]


def parse_outliers(text: str | None) -> list[int]:
    """`1,30` -> factors. Raises ConfigError."""
    try:
        factors = [int(part) for part in text.split(",")] if text else list(OUTLIERS)
    except ValueError:
        factors = [0]
    if any(not 1 <= factor <= 1000 for factor in factors):
        raise ConfigError(f"--outliers {text}: expected factors of 1 to 1000 such as {','.join(map(str, OUTLIERS))}")
    return factors


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--plot", type=Path, help="also draw them into this PNG file")
    parser.add_argument("--tools", help="only these tools or tool/recipe, separated by commas")
    parser.add_argument("--outliers", help=f"only these factors, separated by commas: {','.join(map(str, OUTLIERS))}")
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--workdir", type=Path, default=Path("build/quality"), help="for models and results: 2 GB")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="the Python that has NAME")
    parser.add_argument("--model", type=Path, default=DEMO_FOLDER, help="another model; give it a --workdir of its own")
    parser.add_argument("--quick", action="store_true", help="fewer calibration rows and evaluation tokens")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--group-size", type=int, help="inputs that share a scale; not of llama.cpp, float4")
    parser.add_argument("--rows", type=int, help="calibration rows of all tools")
    parser.add_argument("--calibration", help="their text, as lmkit's --calibration takes it; default the demo's")
    parser.add_argument("--text", type=Path, help="the text to evaluate on; default the demo model's held-out text")
    parser.add_argument("--eval-tokens", type=int, help="of that text")
    arguments = parser.parse_args()
    if min(arguments.threads, arguments.rows or 1, arguments.eval_tokens or 2, arguments.group_size or 1) < 1:
        parser.error("--threads, --rows, --eval-tokens and --group-size are at least 1")
    return arguments


if __name__ == "__main__":
    main()
