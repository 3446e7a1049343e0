"""Tests of the CPU kernels with ARM's own instructions, under qemu-user: `make test-arm`, after `make arm-root` once.

The root is a folder with an arm64 system as far as Python needs it. apt of a Debian machine fetches its packages and
dpkg-deb unpacks them there: nothing is installed, and nothing is changed on this machine. pip adds wheels for aarch64.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
HOME = REPOSITORY / "build" / "arm64"
ROOT, SITE = HOME / "root", HOME / "site"
TORCH = "torch==2.10.0"  # later wheels for aarch64 need CUDA's libraries
TOOLS = ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "sympy", "networkx", "fsspec", "filelock"]
CPUS = {"max": "neon_i8mm", "neoverse-n1": "neon_dot", "a64fx": "portable"}  # as qemu names them: the best level
FILES = ("tests/kernels/test_oracle.py", "tests/kernels/test_invariance.py")
# Cases of each kernel of a level: all types of weights, keys and values. Compilation under qemu takes most of the time.
TESTS = (
    "(test_agrees_with_the_reference and {level}-"
    " and (g128-torch.float32 or linear_dense-5x100x50 or (paged_attention and (16-0 or 128-0))))"
    " or (test_linear_rows and not of_arm)"
)


def call(*command: str | Path) -> None:
    """Run a command, which prints what is wrong, and end if it fails."""
    if code := subprocess.run(command).returncode:
        sys.exit(code)


def make_root() -> None:
    if lacking := [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]:
        sys.exit(f"arm-root: no {' and no '.join(lacking)} in PATH: make the root on a Debian machine")
    apt = HOME / "apt"
    for folder in ("state/lists", "cache/archives"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()  # of a machine with no packages: apt then fetches all that python3 needs
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "Dir::State": apt / "state",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache",
        "Debug::NoLocking": "1",
        "APT::Sandbox::User": "",  # the user who runs it
    }
    command = ["apt-get", "-q", "-y", *(f"-o{name}={value}" for name, value in options.items())]
    call(*command, "update")
    packages = ["python3", "libgomp1", "libstdc++6"]
    call(*command, "install", "--download-only", "--no-install-recommends", *packages)
    for package in sorted((apt / "cache" / "archives").glob("*.deb")):
        call("dpkg-deb", "--extract", package, ROOT)

    version = (ROOT / "usr/bin/python3").readlink().name.removeprefix("python")
    pinned = HOME / "constraints.txt"
    pinned.write_text(re.sub(r"(?m)^torch==.*\n", "", (REPOSITORY / "constraints.txt").read_text()))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    others = [name for name in project["dependencies"] if not name.startswith("torch")]
    glibc = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 24, 27, 28, 34)]
    pip = [sys.executable, "-m", "pip", "install", f"--target={SITE}", f"--python-version={version}", *glibc]
    pip += ["--platform=manylinux2014_aarch64", "--only-binary=:all:", "--upgrade"]
    call(*pip, f"--constraint={pinned}", *others, *TOOLS)
    call(*pip, "--no-deps", TORCH)


def run_tests() -> None:
    qemu = next(filter(None, map(shutil.which, ("qemu-aarch64", "qemu-aarch64-static"))), None)
    if qemu is None:
        sys.exit("test-arm: no qemu-aarch64 in PATH: install qemu-user or qemu-user-static")
    if not (SITE / "torch").is_dir():
        sys.exit(f"test-arm: no arm64 system in {ROOT}: make it with `make arm-root`")
    os.environ |= {"PYTHONPATH": f"{SITE}:{REPOSITORY}", "LMKIT_CACHE_DIR": str(HOME / "cache")}
    for cpu, level in CPUS.items():
        python = (qemu, "-cpu", cpu, "-L", ROOT, ROOT / "usr/bin/python3")
        check = f"from lmkit.kernels.cpu import isa; found = isa.host().name; print('{cpu}:', found)"
        check += f"; assert found == '{level}', 'expected {level}'"
        call(*python, "-c", check)
        call(*python, "-m", "pytest", "-q", "--timeout=3600", *FILES, "-k", TESTS.format(level=f"cpu.{level}"))


if __name__ == "__main__":
    make_root() if sys.argv[1:] == ["root"] else run_tests()
