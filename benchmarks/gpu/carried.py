"""Packages that the kit brings along, for a machine without a network: the wheels in `benchmarks/gpu/wheels`.

    pip download --no-deps --only-binary=:all: --python-version 3.12 --dest benchmarks/gpu/wheels msgspec

The kit takes their modules where the machine has no others. It needs msgspec. pyzmq and fastapi are for transport and
server, which it does not use.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import zipfile
from pathlib import Path

WHEELS = Path(__file__).parent / "wheels"


def use(folder: Path = WHEELS) -> list[str]:
    """Make the carried modules importable, here and in processes that start later, after those of the machine. Returns
    the names of those that the machine does not have."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        return []
    place = Path(tempfile.gettempdir()) / f"lmkit-carried-{os.getpid()}"
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as file:
            file.extractall(place)
    modules = {path.stem for path in place.iterdir() if not path.suffix.startswith(".dist-info")}
    missing = sorted(name for name in modules if importlib.util.find_spec(name) is None)
    sys.path.append(str(place))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(place))))
    return missing
