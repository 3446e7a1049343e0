"""Extras: the packages of single features. `pip install lmkit` brings what serving needs, `lmkit[NAME]` the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import NamedTuple

from lmkit.errors import UnsupportedError


class Extra(NamedTuple):
    """`modules` are the imports that the extra brings; `purpose` is what needs them."""

    modules: tuple[str, ...]
    purpose: str

    def missing(self) -> list[str]:
        return [name for name in self.modules if find_spec(name) is None]


EXTRAS = {
    "quantize": Extra(
        ("datasets", "pyarrow", "accelerate"),
        "calibration data of the Hugging Face Hub, Parquet and saved data sets; quantizing with several processes",
    ),
    "any": Extra(("transformers",), "models of architectures that lmkit does not know and transformers does"),
    "hub": Extra(("huggingface_hub",), "models fetched from the Hugging Face Hub by name"),
    "bench": Extra(("matplotlib",), "plots"),
    "images": Extra(("PIL",), "images in prompts of models that see"),
    "video": Extra(("PIL", "av"), "videos in such prompts: MP4, MOV, WebM and Matroska"),
    "audio": Extra(("transformers",), "transcriptions by models that hear"),
    "grpc": Extra(("grpc", "grpc_health", "google"), "--grpc-port of lmkit serve and lmkit proxy"),
    "otel": Extra(("opentelemetry",), "traces of lmkit serve and lmkit proxy"),
    "receipts": Extra(("cryptography",), "signed receipts of answers, and `lmkit replay`"),
    "ray": Extra(("ray",), "a Ray cluster: replicas of lmkit up, and --cluster ray of lmkit serve"),
    "cuda": Extra(("cupy",), "kernels on an NVIDIA GPU with CUDA 13; lmkit[cuda12] is for CUDA 12"),
}


@contextmanager
def needed_for(feature: str) -> Iterator[None]:
    """Around the import of an extra's packages. Raises UnsupportedError that names the extra if one is missing."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        for name, extra in EXTRAS.items():
            if package in extra.modules:
                raise UnsupportedError(f"{feature} needs {package}: {install(name)}") from None
        raise UnsupportedError(f"{feature}: {error}") from None


def install(name: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'lmkit[{name}]'"
