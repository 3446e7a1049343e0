"""From a model's name to a folder on this machine. No torch here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from lmkit.errors import CheckpointError
from lmkit.extras import needed_for
from lmkit.formats.gguf_model import SUFFIX, find_gguf, is_gguf

DEMO = "demo"
DEMO_FOLDER = Path(__file__).resolve().parents[1] / "demo" / "model"
DEMO_HEAD = DEMO_FOLDER.parent / "draft_head"  # of that model: it drafts its tokens

# Weights as safetensors, and text files; never pickled weights or code.
WEIGHTS = "*.safetensors"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
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


def resolve_model_path(name: str | Path, *, weights: bool = True, revision: str | None = None) -> Path:
    """The folder of a checkpoint: an existing one, the bundled "demo", or a snapshot of a Hugging Face Hub repository.
    A model in GGUF has a file, the first one, in place of a folder.

    Only a string that could name a repository (`model`, `owner/model`) is looked up on the Hub, through the Hub's own
    cache and settings. Without `weights`, only the small files are fetched, and a folder may hold anything. `revision`
    is a branch, tag or commit of a repository. Raises CheckpointError with advice.
    """
    path = Path(name)
    if revision is not None and (name == DEMO or os.path.exists(name)):
        raise CheckpointError(f"{path}: --revision {revision} is for a model of the Hub; a folder has only one")
    if os.path.isdir(name):  # os.path: names too long for the file system are no error
        found = path
    elif os.path.exists(name):
        if is_gguf(path):
            return find_gguf(path)
        raise CheckpointError(f"{path}: {_about_file(path)}")
    elif name == DEMO:
        return DEMO_FOLDER
    elif isinstance(name, Path) or not _may_be_repository(name):
        raise CheckpointError(f"{name}: no such folder")
    else:
        found = _download(name, WANTED if weights else [pattern for pattern in WANTED if pattern != WEIGHTS], revision)
    if is_gguf(found) and (weights or not (found / "tokenizer.json").exists()):
        return find_gguf(found)
    if weights and (problem := _about_folder(found)):
        raise CheckpointError(f"{found}: {problem}")
    return found


def _about_file(path: Path) -> str:
    """What to do with a file that was given in place of a checkpoint's folder."""
    if path.suffix in PICKLED:
        return "pickled weights can run code and are not read; give a checkpoint's folder, with safetensors"
    if path.suffix == ".safetensors":
        return f"is only a part of a checkpoint; give its folder ({path.parent}), with config.json and the tokenizer"
    return "is a file; give the checkpoint's folder"


def _about_folder(folder: Path) -> str:
    """The reason why a folder is no checkpoint, or an empty text."""
    try:
        names = set(os.listdir(folder))
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    kinds = {Path(name).suffix for name in names}
    if ".safetensors" not in kinds:
        if kinds & {*PICKLED}:
            return "has only pickled weights, which can run code and are not read; convert them to safetensors"
        return "has no .safetensors weights, so it is no checkpoint" if names else "the folder is empty"
    return "" if "config.json" in names else "has no config.json, so it is no checkpoint"


def _may_be_repository(name: str) -> bool:
    if Path(name).suffix in (SUFFIX, ".safetensors", *PICKLED):
        return False
    return name.count("/") <= 1 and name[:1] not in ("", ".", "/", "~") and not name.endswith("/")


def pull(name: str, *, revision: str | None = None, announce: Callable[[int, int], None]) -> Path:
    """Fetch what lmkit reads of a repository into the Hub's cache, or what is missing of it; returns the folder.

    `announce` gets the number of files and of their bytes. Raises CheckpointError.
    """
    if name == DEMO or os.path.exists(name) or name.count("/") != 1 or not _may_be_repository(name):
        raise CheckpointError(f"{name}: expected a model of the Hugging Face Hub, ORG/NAME")
    with _hub(name, f"{name} cannot be fetched from the Hugging Face Hub: ", ""):
        from huggingface_hub import HfApi

        info = HfApi().model_info(name, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    chosen = [file for file in sizes if _matches(file, WANTED) and not _matches(file, UNWANTED)]
    if not any(_matches(file, [WEIGHTS]) for file in chosen):
        gguf = any(file.endswith(SUFFIX) for file in sizes)
        advice = "; download one of its GGUF files, and serve that" if gguf else ""
        raise CheckpointError(f"{name} has no weights as safetensors{advice}")
    announce(len(chosen), sum(sizes[file] for file in chosen))
    return _download(name, WANTED, info.sha)


def _matches(file: str, patterns: list[str]) -> bool:
    return any(fnmatch(file, pattern) for pattern in patterns)


def _download(name: str, wanted: list[str], revision: str | None = None) -> Path:
    before = f"{name}: no such folder, and it cannot be fetched from the Hugging Face Hub ("
    with _hub(name, before, "); give the path of a downloaded checkpoint folder"):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=UNWANTED))


@contextmanager
def _hub(name: str, before: str, after: str) -> Iterator[None]:
    """Around calls of huggingface_hub. Raises CheckpointError with the reason between the two texts."""
    with needed_for(f"{name}: no such folder, and fetching it from the Hugging Face Hub"):
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
