"""What a tuning has reached, in two files of the work folder. A killed run goes on from there.

refine-000012.safetensors    changes and Adam's moments after step 12: `changes.3.attn.q`, `means. ...`, `squares. ...`
refine.json                  the step, the file's checksum, and the KL before the first step; written last
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch import Tensor

from lmkit.formats.safetensors_file import SafetensorsFile, write_safetensors
from lmkit.quant.data.workdir import WorkFolder, crc32, damaged
from lmkit.quant.refine.parameters import Changes

RECORD = "refine.json"
KINDS = ("changes", "means", "squares")


class Reached(msgspec.Struct, frozen=True):
    step: int
    crc32: int
    before: float


@dataclass(frozen=True)
class Snapshot:
    work: WorkFolder

    def save(self, before: float, step: int, *parts: list[Changes]) -> None:
        """Keep `parts`, one for each of KINDS, and remove the snapshot before."""
        file, old = self._file(step), self.work.kept(RECORD)
        tensors: dict[str, Tensor] = {
            f"{kind}.{index}.{role}": tensor
            for kind, part in zip(KINDS, parts, strict=True)
            for index, changes in enumerate(part)
            for role, tensor in changes.items()
        }
        file.unlink(missing_ok=True)  # it may remain from a run that was killed
        write_safetensors(file, tensors)
        self.work.keep(RECORD, msgspec.json.encode(Reached(step, crc32(file), before)))
        if old and (last := msgspec.json.decode(old, type=Reached).step) != step:
            self._file(last).unlink(missing_ok=True)

    def load(self) -> tuple[float, int, list[Changes], list[Changes], list[Changes]] | None:
        """(KL before, steps done, changes, means, squares) of the last snapshot. Raises CheckpointError if its bytes
        have changed."""
        if not (data := self.work.kept(RECORD)):
            return None
        reached = msgspec.json.decode(data, type=Reached)
        path = self._file(reached.step)
        if not path.exists() or crc32(path) != reached.crc32:
            raise damaged(path)
        file = SafetensorsFile(path)
        parts: dict[str, dict[int, Changes]] = {kind: {} for kind in KINDS}
        for name in file.infos:
            kind, index, role = name.split(".", 2)
            parts[kind].setdefault(int(index), {})[role] = file.tensor(name).clone()
        changes, means, squares = ([part[i] for i in range(len(part))] for part in parts.values())
        return reached.before, reached.step, changes, means, squares

    def _file(self, step: int) -> Path:
        return self.work.path / f"refine-{step:06d}.safetensors"
