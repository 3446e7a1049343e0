"""From a model's name to a folder on this machine. No torch here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from lmkit.errors import CheckpointError
from lmkit.extras import needed_for

DEMO = "demo"
DEMO_FOLDER = Path(__file__).resolve().parents[1] / "demo" / "model"

# Weights as safetensors, and text files; never pickled weights or code.
WEIGHTS = "*.safetensors"
WANTED = [WEIGHTS, "*.json", "*.jinja", "merges.txt", "tokenizer.model", "LICENSE*"]
UNWANTED = ["*/*", "consolidated*"]  # other exports of the same weights

_LOG_IN = "log in with `hf auth login` or set HF_TOKEN"
REASONS = {
    "GatedRepoError": f"it is gated: accept its terms on its page of the Hub, then {_LOG_IN}",
    "RepositoryNotFoundError": f"there is no such model, or it is private: {_LOG_IN}",
    "RevisionNotFoundError": "it has no such revision",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set",
    "ConnectError": "no connection; is there a network?",
    "TimeoutException": "the connection timed out",
}


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


def pull(name: str, *, revision: str | None = None, announce: Callable[[int, int], None]) -> Path:
    """Fetch what lmkit reads of a repository into the Hub's cache, or what is missing of it; returns the folder.

    `announce` gets the number of files and of their bytes. Raises CheckpointError.
    """
    if name == DEMO or os.path.exists(name) or name.count("/") != 1 or not _may_be_repository(name):
        raise CheckpointError(f"{name}: expected a model of the Hugging Face Hub, ORG/NAME")
    with _hub(f"{name} cannot be fetched from the Hugging Face Hub: ", ""):
        from huggingface_hub import HfApi

        info = HfApi().model_info(name, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    chosen = [file for file in sizes if _matches(file, WANTED) and not _matches(file, UNWANTED)]
    if not any(_matches(file, [WEIGHTS]) for file in chosen):
        gguf = any(file.endswith(".gguf") for file in sizes)
        advice = "; download one of its GGUF files and give it to `lmkit convert`" if gguf else ""
        raise CheckpointError(f"{name} has no weights as safetensors{advice}")
    announce(len(chosen), sum(sizes[file] for file in chosen))
    return _download(name, WANTED, info.sha)


def _matches(file: str, patterns: list[str]) -> bool:
    return any(fnmatch(file, pattern) for pattern in patterns)


def _download(name: str, wanted: list[str], revision: str | None = None) -> Path:
    before = f"{name}: no such folder, and it cannot be fetched from the Hugging Face Hub ("
    with _hub(before, "); give the path of a downloaded checkpoint folder"):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=UNWANTED))


@contextmanager
def _hub(before: str, after: str) -> Iterator[None]:
    """Around calls of huggingface_hub. Raises CheckpointError with the reason between the two texts."""
    with needed_for("fetching a model from the Hugging Face Hub"):
        from huggingface_hub import errors

    # With those of the HTTP library that it uses.
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    expected: tuple[type[Exception], ...] = (OSError, ValueError, *kinds)
    try:
        yield
    except expected as error:
        names = [kind.__name__ for kind in type(error).__mro__]
        said = (str(error) or type(error).__name__).splitlines()[0][:200]
        reason = next((REASONS[name] for name in names if name in REASONS), said)
        raise CheckpointError(f"{before}{reason}{after}") from None
