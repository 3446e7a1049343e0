"""From a model's name to a folder on this machine. No torch here."""

from __future__ import annotations

import os
from pathlib import Path

from lmkit.errors import CheckpointError
from lmkit.extras import needed_for

DEMO = "demo"
DEMO_FOLDER = Path(__file__).resolve().parents[1] / "demo" / "model"

# Weights as safetensors, and text files; never pickled weights or code.
WEIGHTS = "*.safetensors"
WANTED = [WEIGHTS, "*.json", "*.jinja", "merges.txt", "tokenizer.model", "LICENSE*"]
UNWANTED = ["*/*", "consolidated*"]  # other exports of the same weights


def resolve_model_path(name: str | Path, *, weights: bool = True) -> Path:
    """The folder of a checkpoint: an existing one, the bundled "demo", or a snapshot of a Hugging Face Hub repository.

    Only a string that could name a repository (`model`, `owner/model`) is looked up on the Hub, through the Hub's own
    cache and settings. Without `weights`, only the small files are fetched. Raises CheckpointError with advice.
    """
    path = Path(name)
    if os.path.isdir(name):  # os.path: names too long for the file system are no error
        return path
    if os.path.exists(name):
        raise CheckpointError(f"{path}: is a file; give the checkpoint's folder")
    if name == DEMO:
        return DEMO_FOLDER
    if isinstance(name, Path) or not _may_be_repository(name):
        raise CheckpointError(f"{name}: no such folder")
    return _download(name, WANTED if weights else [pattern for pattern in WANTED if pattern != WEIGHTS])


def _may_be_repository(name: str) -> bool:
    return name.count("/") <= 1 and name[:1] not in ("", ".", "/", "~") and not name.endswith("/")


def _download(name: str, wanted: list[str]) -> Path:
    import httpx

    with needed_for(f"{name}: no such folder, and fetching it from the Hugging Face Hub"):
        import huggingface_hub
        from huggingface_hub import errors

    hub_errors = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    expected: tuple[type[Exception], ...] = (OSError, ValueError, httpx.HTTPError, *hub_errors)
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted, ignore_patterns=UNWANTED))
    except expected as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise CheckpointError(
            f"{name}: no such folder, and it cannot be fetched from the Hugging Face Hub ({reason}); "
            "give the path of a downloaded checkpoint folder"
        ) from None
