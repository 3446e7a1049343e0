"""Folders with the names of blocks on disk are left alone."""

from __future__ import annotations

from pathlib import Path

from lmkit.turbo.kv.tiers import files


def test_folders_are_no_blocks(tmp_path: Path) -> None:
    kinds = {kind: bytes([number] * files.KEY_BYTES) for number, kind in enumerate(("file", "folder"), 1)}
    paths = {kind: Path(files.file_of(str(tmp_path), key)) for kind, key in kinds.items()}
    for path in paths.values():
        path.parent.mkdir()
        (path.parent / files.PARTIAL).mkdir()
    paths["file"].write_bytes(b"block")
    paths["folder"].mkdir()
    assert [stored.key for stored in files.listing(str(tmp_path))] == [kinds["file"]]
    assert all(path.exists() for path in paths.values())
