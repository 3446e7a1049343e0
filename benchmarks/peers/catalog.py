"""The compared engines, and the points at which they are measured."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class EngineKind:
    """`form` is the file or folder that `maker` makes. None: the engine reads the bfloat16 checkpoint itself."""

    name: str
    module: str
    packages: tuple[str, ...]  # packages that its Python must have
    form: str | None
    label: str  # in a plot
    python: str = ""  # NAME in `--peer NAME=PYTHON`, if not `name`
    maker: str = ""  # the engine whose `prepare` makes the form, if not this one
    isa: str = ""  # LMKIT_CPU_ISA of its process

    @property
    def is_peer(self) -> bool:
        return not self.name.startswith("lmkit")


ENGINES = {
    kind.name: kind
    for kind in (
        EngineKind("lmkit", "lmkit_engine", ("lmkit",), "lmkit-awq", "lmkit"),
        EngineKind("lmkit-int8", "lmkit_int8", ("lmkit",), "lmkit-awq", "lmkit, INT8 head and KV", maker="lmkit"),
        EngineKind("llama.cpp", "llama_cpp", ("llama_cpp", "gguf"), "q4_0.gguf", "llama.cpp"),
        EngineKind(
            "openvino",
            "openvino_genai",
            ("openvino_genai", "openvino_tokenizers", "optimum.intel", "nncf"),
            "openvino-int4",
            "OpenVINO GenAI",
        ),
        EngineKind("transformers", "transformers_engine", ("transformers", "torch"), None, "transformers"),
        EngineKind("vllm", "vllm_cpu", ("vllm",), None, "vLLM"),
        EngineKind("vllm-awq", "vllm_cpu", ("vllm",), "lmkit-awq", "vLLM, AWQ", python="vllm", maker="lmkit"),
    )
}


def at_levels(kinds: list[EngineKind], levels: list[str]) -> list[EngineKind]:
    """`kinds`, each of lmkit's followed by itself at other instruction set levels."""
    lower = {
        kind.name: [
            replace(kind, name=f"{kind.name}@{level}", label=f"{kind.label}, {level}", isa=level, maker="lmkit")
            for level in levels
            if not kind.is_peer
        ]
        for kind in kinds
    }
    return [each for kind in kinds for each in (kind, *lower[kind.name])]


@dataclass(frozen=True)
class Point:
    """`steps` 0 measures the prompt. Otherwise so many steps of every sequence are measured after the prompt.

    `small_kv` is for engines with a KV cache of 8 bits.
    """

    name: str
    batch: int
    prompt_len: int
    steps: int
    small_kv: bool = False

    @property
    def prompt_tokens(self) -> int:
        return self.batch * self.prompt_len

    @property
    def label(self) -> str:
        if not self.steps:
            return f"prompt\nof {self.prompt_len}"
        sequences = f"{self.batch} sequence{'s' if self.batch > 1 else ''}"
        return f"{sequences},\n2k, 8-bit KV" if self.small_kv else sequences


POINTS = {
    point.name: point
    for point in (
        Point("prefill512", 1, 512, 0),
        Point("prefill4096", 1, 4096, 0),
        Point("prefill8000", 1, 8000, 0),
        Point("b1", 1, 64, 32),
        Point("b4", 4, 64, 24),
        Point("b16", 16, 64, 16),
        Point("b64", 64, 64, 8),
        Point("b16-2k", 16, 2048, 16, small_kv=True),
    )
}
