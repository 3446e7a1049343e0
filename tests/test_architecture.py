"""The rules of docs/architecture.md, read off the source: imports only go down, and what no file may do."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lmkit"
FILES = sorted(p for p in PACKAGE.rglob("*.py") if "demo" not in p.relative_to(PACKAGE).parts)

FLOORS = {
    "codes": 0, "scales": 0,
    "errors": 0, "config": 0, "log": 0, "qtensor": 0, "text": 0, "__init__": 0, "kv_dtype": 0, "low_rank": 0,
    "attention_spec": 0, "other_names": 0, "jsonfile": 0, "neutral": 0, "hints": 0, "yaml_file": 0, "extras": 0,
    "cores": 0, "ended": 0, "private_folder": 0, "small_files": 0, "strict": 0, "choices": 0, "checked": 0, "whole": 0,
    "option": 0, "devices": 0, "environment": 0, "garbage": 0, "conflicts": 0, "wav": 0,
    "kernels": 1, "formats": 1, "web": 1,
    "layers": 2,
    "models": 3,
    "quant": 4, "turbo": 4,
    "serve": 5, "proxy": 5, "api": 5, "program": 5, "bench": 5, "advise": 5, "conform": 5,
    "cluster": 6,
    "cli": 7,
}  # fmt: skip
SAME_FLOOR_STRANGERS = {frozenset(pair) for pair in [("kernels", "formats"), ("web", "kernels"), ("web", "formats"),
                                                     ("quant", "turbo"), ("serve", "proxy"),
                                                     ("proxy", "api"), ("serve", "api"), ("program", "serve"),
                                                     ("bench", "serve"), ("bench", "proxy")]}  # fmt: skip
# What these rooms may import besides the lowest floor.
ONLY = {"proxy": {"web"}, "cluster": {"proxy", "web"}, "conform": {"web"}}
# Importing these, and all that they import, must not import torch.
TORCH_FREE = [
    "lmkit", "lmkit.errors", "lmkit.config", "lmkit.environment", "lmkit.log",
    "lmkit.text", "lmkit.models", "lmkit.cli.main", "lmkit.quant.sections",
    "lmkit.kv_dtype", "lmkit.attention_spec", "lmkit.web.server", "lmkit.proxy.server", "lmkit.serve.http",
    "lmkit.cluster.cluster",
    "lmkit.neutral", "lmkit.extras", "lmkit.api.async_pipeline", "lmkit.program",
    "lmkit.bench.online", "lmkit.bench.report", "lmkit.bench.plot", "lmkit.advise.describe",
    "lmkit.conform.suites", "lmkit.advise.server", "lmkit.advise.settings", "lmkit.advise.workload",
    "lmkit.turbo.request", "lmkit.turbo.sequence", "lmkit.turbo.plan", "lmkit.turbo.kv.block_pool",
    "lmkit.turbo.kv.radix_cache", "lmkit.turbo.kv.manager", "lmkit.turbo.kv.tiers.store",
    "lmkit.turbo.scheduling.policy", "lmkit.turbo.scheduling.scheduler", "lmkit.turbo.scheduling.pacing",
    "lmkit.turbo.engine.memory", "lmkit.turbo.transport.async_engine", "lmkit.turbo.transport.output",
]  # fmt: skip


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(absolute module, line) of every import of lmkit, in-function imports included, TYPE_CHECKING ones too."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            folder = PACKAGE.parent / (node.module or "").replace(".", "/")
            for alias in node.names:
                submodule = (folder / f"{alias.name}.py").exists() or (folder / alias.name / "__init__.py").exists()
                yield f"{node.module}.{alias.name}" if submodule else node.module or "", node.lineno


def test_imports_only_go_down() -> None:
    wrong = []
    for path in FILES:
        here = room(module_name(path))
        if here in ("__init__", "__main__"):
            continue
        for target, line in imports(path):
            if not target.startswith("lmkit.") or (there := room(target)) == here:
                continue
            strangers = frozenset((here, there)) in SAME_FLOOR_STRANGERS
            stranger = here in ONLY and FLOORS[there] > 0 and there not in ONLY[here]
            if FLOORS[there] > FLOORS[here] or strangers or stranger:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {here} imports {target}")
    assert not wrong, "\n".join(wrong)


# Inside a room of several floors: a module on one of them imports from it and from those before it.
INNER_FLOORS = {
    "codes": 0, "scales": 0,
    "turbo": ("repetition", "speech", "request", "plan", "adapters", "changes", "sequence", "decisions", "step_sizes",
              "host_memory", "no_memory", "kv", "scheduling", "runners", "engine", "transport"),
}  # fmt: skip


@pytest.mark.parametrize("name", INNER_FLOORS)
def test_floors_inside_a_room(name: str) -> None:
    floors, wrong = INNER_FLOORS[name], []
    for path in sorted((PACKAGE / name).rglob("*.py")):
        if path.name == "__init__.py":
            continue
        here = path.relative_to(PACKAGE / name).with_suffix("").parts[0]
        for target, line in imports(path):
            if target.startswith(f"lmkit.{name}."):
                there = target.split(".")[2]
                if floors.index(there) > floors.index(here):
                    wrong.append(f"{path.relative_to(ROOT)}:{line}: {here} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles() -> None:
    graph = {module_name(p): {t for t, _ in imports(p) if t.startswith("lmkit")} for p in FILES}
    graph = {name: {t for t in targets if t in graph and t != name} for name, targets in graph.items()}
    graph["lmkit"] = set()  # its names are resolved on first use: only a type checker reads its imports
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for target in graph[name]:
                visit(target, [*path, name])
            done.add(name)

    for name in graph:
        # A package's __init__ may gather its modules' names; cycles are looked for among the modules themselves.
        if not (PACKAGE.parent / name.replace(".", "/") / "__init__.py").exists():
            visit(name, [])


NUMPY_FREE = "lmkit.cli.main", "lmkit.serve.http", "lmkit.proxy.server", "lmkit.cluster.cluster"


@pytest.mark.parametrize("module", TORCH_FREE)
def test_loads_no_torch(module: str) -> None:
    slow = {"torch", "transformers"} | ({"numpy"} if module in NUMPY_FREE else set())
    code = f"import sys, {module}; sys.exit(bool({slow} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def _calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_forbidden_constructs() -> None:
    wrong = []
    for path in FILES:
        where, tree = path.relative_to(PACKAGE).as_posix(), parsed(path)
        for node in ast.walk(tree):
            line = f"{where}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Global):
                wrong.append(f"{line}: global")
            environ = isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv")
            if environ and where != "environment.py":
                wrong.append(f"{line}: the environment is read in environment.py only")
            if isinstance(node, ast.ImportFrom | ast.Import):
                names = {a.name.split(".")[0] for a in node.names} | {(getattr(node, "module", "") or "").split(".")[0]}
                if names & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}:
                    wrong.append(f"{line}: pickle")
        for name, call in _calls(tree):
            line = f"{where}:{call.lineno}"
            if name == "torch.load":
                wrong.append(f"{line}: torch.load")
            if name == "print" and not where.startswith("cli/"):
                wrong.append(f"{line}: print outside cli")
            if any(keyword.arg == "trust_remote_code" for keyword in call.keywords):
                wrong.append(f"{line}: trust_remote_code")
            if name.endswith((".recv_pyobj", ".send_pyobj")):
                wrong.append(f"{line}: pickle on a socket")
    assert not wrong, "\n".join(wrong)


BROAD_EXCEPT_ALLOWED = {
    "models/flexible/trace.py",  # a module that fails without weights is traced with some
    "text/processor_process.py",  # a processor of transformers refuses an image in its own ways
    "models/flexible/module.py",  # an error of transformers names the architecture
    "turbo/engine/adapters.py",  # a call to load one never ends the engine
    "turbo/engine/engine.py",  # the engine step: one request never ends the engine
    "turbo/runners/draft_model_runner.py",  # draft tokens are never needed
    "turbo/runners/stages.py",  # the plan's ticket raises it
    "turbo/runners/step_thread.py",
    "turbo/transport/async_engine.py",
    "turbo/transport/engine_process.py",
    "serve/errors.py",  # the HTTP edges
    "serve/hooks/worker.py",  # around an operator's code
    "serve/batches/runner.py",  # a batch has no request that could carry its error
    "proxy/app.py",
}


def test_broad_except_only_at_the_edges() -> None:
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ExceptHandler):
                broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
                where = path.relative_to(PACKAGE).as_posix()
                reraises = any(isinstance(n, ast.Raise) and n.exc is None for n in ast.walk(node))
                assert not broad or reraises or where in BROAD_EXCEPT_ALLOWED, f"{where}:{node.lineno}"


def test_every_op_has_a_reference() -> None:
    from lmkit.kernels import ops
    from lmkit.kernels.registry import Op

    for op in vars(ops).values():
        if isinstance(op, Op):
            assert op.named("reference").device == "any", op.name


PREPOSITIONS = {"above", "after", "apart", "aside", "before", "behind", "below", "beside", "between", "over", "under"}


def test_modules_are_named_for_things() -> None:
    assert not [path.relative_to(PACKAGE) for path in FILES if path.stem in PREPOSITIONS]


def packed_to_be_starred(tree: ast.AST) -> Iterator[int]:
    """Lines of a tuple that a function makes of several values only to pass them on with a star."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        nodes = list(ast.walk(function))
        arguments = [argument for node in nodes if isinstance(node, ast.Call) for argument in node.args]
        starred = {id(argument.value) for argument in arguments if isinstance(argument, ast.Starred)}
        for made in nodes:
            if isinstance(made, ast.Assign) and isinstance(made.value, ast.Tuple):
                names = {target.id for target in made.targets if isinstance(target, ast.Name)}
                read = [n for n in nodes if isinstance(n, ast.Name) and n.id in names and isinstance(n.ctx, ast.Load)]
                if read and all(id(node) in starred for node in read):
                    yield made.lineno


def test_no_variable_is_called_of_and_no_tuple_is_packed_to_be_starred() -> None:
    """Kernels are apart: their tasks take a place in memory as several numbers, again and again."""
    found = []
    for path in FILES:
        names = [n.id for n in ast.walk(parsed(path)) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        names += [n.arg for n in ast.walk(parsed(path)) if isinstance(n, ast.arg)]
        found += [f"{path.relative_to(ROOT)}: of"] * ("of" in names)
        if "kernels" not in path.relative_to(PACKAGE).parts:
            found += [f"{path.relative_to(ROOT)}:{line}" for line in packed_to_be_starred(parsed(path))]
    assert not found
    assert list(packed_to_be_starred(ast.parse("def f():\n    a = 1, 2\n    g(*a)"))) == [2]
    assert not list(packed_to_be_starred(ast.parse("def f():\n    a = 1, 2\n    g(*a, a[0])")))


def test_files_are_readable_in_five_minutes() -> None:
    for path in [*FILES, *sorted((ROOT / "benchmarks").rglob("*.py"))]:
        lines = path.read_text().splitlines()
        justified = any("Longer than usual" in line for line in lines[:40])
        assert len(lines) <= 400 or justified, f"{path.relative_to(ROOT)}: {len(lines)} lines"


MOST_LINES = 60  # of a function
# Longer: commands, whose options are their parameters; kernels, which are compiled whole; five that are long today.
LONG_FUNCTIONS = {
    "cli/advise.py:advise", "cli/chat.py:chat", "cli/proxy.py:proxy", "cli/quantize.py:quantize", "cli/serve.py:serve",
    "kernels/cpu/amx/dense.py:product", "kernels/cpu/amx/dense.py:product_task",
    "kernels/cpu/attention.py:_attend_unit", "kernels/cpu/attention_tiles.py:body",
    "kernels/cpu/attention_tiles.py:softmax_tile", "kernels/cpu/tiles.py:int_tile",
    "quant/report/evaluate.py:evaluate", "turbo/engine/engine.py:_make", "turbo/engine/loading.py:load",
    "turbo/engine/memory.py:plan_memory", "turbo/engine/rank_process.py:main",
}  # fmt: skip


def test_functions_fit_a_screen() -> None:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    functions = ((path, node) for path in FILES for node in ast.walk(parsed(path)) if isinstance(node, kinds))
    long = {
        f"{path.relative_to(PACKAGE).as_posix()}:{node.name}"
        for path, node in functions
        if node.end_lineno is not None and node.end_lineno - node.lineno >= MOST_LINES
    }
    assert long <= LONG_FUNCTIONS, f"more than {MOST_LINES} lines: {', '.join(sorted(long - LONG_FUNCTIONS))}"


def classes_below(bases: set[str], folder: str) -> dict[str, Path]:
    """The classes of a folder with one of these bases, or with one of theirs, each with its file."""
    found: dict[str, Path] = {}
    known, files = bases, sorted((PACKAGE / folder).rglob("*.py"))
    while True:
        new = {
            node.name: path
            for path in files
            for node in parsed(path).body
            if isinstance(node, ast.ClassDef) and known & {ast.unparse(base) for base in node.bases}
        }
        if new.keys() == found.keys():
            return found
        found, known = new, known | new.keys()


def kinds_asked(path: Path) -> Iterator[tuple[str, int]]:
    """(class, line) of every test of a value's class."""
    for node in ast.walk(parsed(path)):
        tested: list[ast.AST] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            tested = [node.args[1]]
        elif isinstance(node, ast.Compare) and ast.unparse(node.left).startswith("type("):
            tested = list(node.comparators)
        elif isinstance(node, ast.MatchClass):
            tested = [node.cls]
        for part in tested:
            yield from ((name.id, name.lineno) for name in ast.walk(part) if isinstance(name, ast.Name))


def test_no_block_is_asked_for_its_kind() -> None:
    """A block answers; only its own files know which one it is (layers/forward.py has the table)."""
    blocks = classes_below({"Block", "Forward"}, "layers")
    assert {"SelfAttentionSpec", "MoESpec", "Attention", "LatentAttention", "MoE"} <= blocks.keys()
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in FILES
        for name, line in kinds_asked(path)
        if name in blocks and not path.stem.startswith(blocks[name].stem)
    ]
    assert not wrong, "\n".join(wrong)


# The rooms of devices: the table of them, and the place where a quantization's option becomes torch's device.
DEVICE_ROOMS = {"devices.py", "quant/device.py"}
DEVICE_NAMES = {"cpu", "cuda"}
NAMED_DEVICES = {"CPU", "CUDA", "TORCH"}  # of lmkit.devices


def names_device(node: ast.AST) -> bool:
    """Whether this is a device's name, or one of lmkit.devices or its name, or has one of them in it."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value.partition(":")[0] in DEVICE_NAMES
    if isinstance(node, ast.Name):
        return node.id in NAMED_DEVICES
    if isinstance(node, ast.Attribute):
        return names_device(node.value)
    return isinstance(node, ast.Tuple | ast.List | ast.Set) and any(map(names_device, node.elts))


def devices_asked(tree: ast.AST) -> Iterator[int]:
    """The lines that compare with a device's name, or look something up by one."""
    for node in ast.walk(tree):
        asked: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.Subscript):
            asked = [node.slice]
        elif isinstance(node, ast.MatchValue):
            asked = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
            asked = list(node.args)
        elif isinstance(node, ast.Dict):
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            if set(keys) >= DEVICE_NAMES:
                yield node.lineno
        if any(map(names_device, asked)):
            yield node.lineno


@pytest.mark.parametrize(
    "code",
    [
        'device == "cpu"', 'at.type != "cuda"', 'device in ("cuda", "cpu")', 'at.startswith("cuda")', 'SIZES["cpu"]',
        '{"cpu": 1, "cuda": 2}', "device is CUDA", "name == CPU.name", 'match x:\n case "cuda:0": pass',
    ],
)  # fmt: skip
def test_a_question_for_a_device_kind_is_found(code: str) -> None:
    assert list(devices_asked(ast.parse(code)))


def test_no_device_is_asked_for_its_name_or_kind() -> None:
    """A device answers (lmkit.devices, turbo.runners.device); kernels alone are made for one."""
    kinds = classes_below({"EngineDevice", "PlanRunner"}, "turbo") | {"EngineDevice": PACKAGE, "PlanRunner": PACKAGE}
    assert {"CpuDevice", "CudaDevice", "Gpu", "CpuRunner", "CudaRunner", "LeadingRunner", "FirstStage"} <= kinds.keys()
    wrong = []
    for path in FILES:
        where = path.relative_to(PACKAGE).as_posix()
        if where.startswith("kernels/"):
            continue
        if where not in DEVICE_ROOMS:
            wrong += [f"{where}:{line}: compares devices" for line in devices_asked(parsed(path))]
        wrong += [f"{where}:{line}: {name}" for name, line in kinds_asked(path) if name in kinds]
    assert not wrong, "\n".join(wrong)
