"""The compared tools and their recipes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tool:
    """`module` is in this package. `packages` must be importable in the tool's Python; `pip` installs them."""

    name: str
    module: str
    packages: tuple[str, ...]
    recipes: tuple[str, ...]
    pip: str


LMKIT_RECIPES = ("rtn", "awq", "gptq", "awq_gptq", "default", "refined", "mixed_3.0", "mixed_2.5",
                 "rtn_nvfp4", "nvfp4", "rtn_mxfp4", "mxfp4")  # fmt: skip
COMPRESSOR_RECIPES = ("awq", "gptq", "rtn_nvfp4", "gptq_nvfp4", "rtn_mxfp4", "gptq_mxfp4")
ROUND_RECIPES = ("light", "signround", "awq+signround", "light_nvfp4", "light_mxfp4")
TOOLS = {
    tool.name: tool
    for tool in (
        Tool("lmkit", "lmkit_tool", ("lmkit", "msgspec", "numba"), LMKIT_RECIPES, "."),
        Tool("llm-compressor", "llm_compressor", ("llmcompressor",), COMPRESSOR_RECIPES, "llmcompressor"),
        Tool("auto-round", "auto_round", ("auto_round",), ROUND_RECIPES, "auto-round"),
        Tool("gptqmodel", "gptqmodel", ("gptqmodel",), ("gptq", "awq"), "gptqmodel"),
        Tool(
            "llama.cpp",
            "llama_cpp",
            ("llama_cpp", "gguf", "transformers"),
            ("iq4_xs", "iq3_xxs", "iq2_s"),
            "llama-cpp-python gguf transformers",
        ),
        Tool("autoawq", "autoawq", ("awq",), ("awq",), "autoawq transformers==4.51.3"),
    )
}


@dataclass(frozen=True)
class Entry:
    """One column of figures: a tool with a recipe."""

    tool: str
    recipe: str

    @property
    def name(self) -> str:
        return f"{self.tool}/{self.recipe}"


ENTRIES = tuple(Entry(tool.name, recipe) for tool in TOOLS.values() for recipe in tool.recipes)
OUTLIERS = (1, 8, 30, 100)
