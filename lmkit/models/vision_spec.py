"""A vision tower as data. No torch: a model's specification holds one, and `lmkit inspect` reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

Shapes = dict[str, tuple[int, ...]]


class Names(NamedTuple):
    """Names of a tower's tensors, after its prefix. `layer` begins those of a layer's linears and norms."""

    mlp: tuple[str, ...]  # gate, up and down, or without a gate
    attention: tuple[str, ...] = ("attn.qkv",)  # q, k and v, in one or each by itself
    attention_out: str = "attn.proj"
    norms: tuple[str, str] = ("norm1", "norm2")
    layer: str = "blocks.{}."
    patch: str = "patch_embed.proj"
    positions: str = "pos_embed"
    first: str = ""  # a row beside the patches, which is left out at the end; positions begin with its own
    scales: tuple[str, ...] = ()  # factors on what a layer's attention and MLP give


class Reading(NamedTuple):
    """How images are read, unless preprocessor_config.json says otherwise. `resample`: Pillow's number, 2 is bilinear
    and 3 bicubic. An image has its own shape, unless a side is given."""

    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)  # by color
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    resample: int = 3
    side: int = 0  # pixels of both sides, which all images are stretched to
    edge: int = 0  # pixels of the longer side at most; images are not made larger
    tiles: tuple[int, int] = (0, 0)  # squares of `side` that an image is cut into, at least and at most; 0 = none


class Timed(NamedTuple):
    """How videos stand in prompts, of a tower that reads them: pairs of frames, each after the second of its middle, or
    all of them as one grid."""

    token_id: int  # stands for each row of output
    mark: str = "<|vision_start|><|video_pad|><|vision_end|>"  # what chat templates write for a video
    pair: str = "<{:.1f} seconds><|vision_start|><|video_pad|><|vision_end|>"  # of a pair
    grid: bool = False  # the pairs are one grid, and each frame by itself has the bounds of pixels
    places: float = 0.0  # in time that a second of a grid takes; 0 = each pair takes one


PAD = "<|video_pad|>"
BREAKS = "breaks"  # a tower's name for the embeddings of its merger's `breaks`
GATED = Names(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))
AXES = (0.0, 0.0)
READING = Reading()


@dataclass(frozen=True, kw_only=True)
class Merger:
    """What makes rows of output of the patches of each. models.vision_merge computes them.

    In a prompt a token of its own may end each row of cells but the last, and another one the last: `breaks`, whose
    names are `marks`. Their embeddings are rows of the image, too.
    """

    breaks: tuple[int, ...] = ()
    marks: tuple[str, ...] = ()

    def shapes(self, tower: VisionSpec, width: int) -> Shapes:
        """Shapes of its tensors by name, for a language model of this width."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Joined(Merger):
    """Qwen-VL: a norm of each patch, or of those of a row together, and two linears over the patches of a row."""

    names: tuple[str, str, str] = ("ln_q", "mlp.0", "mlp.2")  # norm and linears
    prefix: str = "merger."

    def shapes(self, tower: VisionSpec, width: int) -> Shapes:
        """See Merger."""
        norm, first, second = self.names
        wide, found = tower.hidden_size * tower.merge_size**2, Shapes()
        for prefix, size in self.mergers(tower).items():
            found |= tower.norm(prefix + norm, size) | tower.linear(prefix + first, wide, wide, bias=True)
            found |= tower.linear(prefix + second, width, wide, bias=True)
        return found

    def mergers(self, tower: VisionSpec) -> dict[str, int]:
        """The width that the norm of each merger has, by the prefix of its names. That of a tapped layer normalizes
        the patches of a row together."""
        wide, taps = tower.hidden_size * tower.merge_size**2, range(len(tower.tapped))
        return {self.prefix: tower.hidden_size} | {f"deepstack_merger_list.{i}.": wide for i in taps}


@dataclass(frozen=True, kw_only=True)
class Pooled(Merger):
    """Gemma 3: the mean of a row's patches, a norm whose factor is 1 + w, and a matrix."""

    norm: str = "multi_modal_projector.mm_soft_emb_norm"
    matrix: str = "multi_modal_projector.mm_input_projection_weight"  # [tower, language model]

    def shapes(self, tower: VisionSpec, width: int) -> Shapes:
        """See Merger."""
        return {f"{self.norm}.weight": (tower.hidden_size,), self.matrix: (tower.hidden_size, width)}


@dataclass(frozen=True, kw_only=True)
class Folded(Merger):
    """Mistral 3: a norm of each patch, a linear over the patches of a row, channel by channel, and two linears."""

    eps: float
    bias: bool
    prefix: str = "multi_modal_projector."

    def shapes(self, tower: VisionSpec, width: int) -> Shapes:
        """See Merger."""
        size, prefix = tower.hidden_size, self.prefix
        found: Shapes = {f"{prefix}norm.weight": (size,)}
        found |= tower.linear(f"{prefix}patch_merger.merging_layer", size, size * tower.merge_size**2, bias=False)
        found |= tower.linear(f"{prefix}linear_1", width, size, bias=self.bias)
        return found | tower.linear(f"{prefix}linear_2", width, width, bias=self.bias)


@dataclass(frozen=True, kw_only=True)
class Shuffled(Merger):
    """InternVL: a LayerNorm of the patches of a row together, and two linears."""

    prefix: str = "multi_modal_projector."
    eps: float = 1e-5  # config.json does not give it

    def shapes(self, tower: VisionSpec, width: int) -> Shapes:
        """See Merger."""
        wide, prefix = tower.hidden_size * tower.merge_size**2, self.prefix
        found = tower.norm(f"{prefix}layer_norm", wide) | tower.linear(f"{prefix}linear_1", width, wide, bias=True)
        return found | tower.linear(f"{prefix}linear_2", width, width, bias=True)


@dataclass(frozen=True, kw_only=True)
class VisionSpec:
    """Sizes of a tower. A patch is `patch_size` pixels wide and high. `merge_size`^2 patches make one row of output.
    Layers attend within windows of `window_size` pixels, and layers of `full_layers` to the whole image."""

    num_layers: int
    hidden_size: int
    inner_size: int  # of the MLP
    num_heads: int
    channels: int
    patch_size: int
    temporal_patch_size: int = 0  # frames of a patch; 0 = the convolution has no such dimension
    merge_size: int
    window_size: int = 0  # 0 = the whole image, in all layers
    full_layers: tuple[int, ...] = ()
    activation: str = "silu"  # of a gated MLP, or of one without a gate
    layer_norm: bool = False  # norms are LayerNorms
    eps: float = 1e-6  # of norms
    bias: bool = True  # of the layers' linears
    qkv_bias: bool | None = None  # of those of q, k and v; None = as `bias`
    patch_bias: bool = False
    positions: int = 0  # side of the square grid of learned positions, which is stretched over the image; 0 = none
    # By how many places the exponents of RoPE's angles by height and by width are shifted; None = no RoPE.
    axes: tuple[float, float] | None = AXES
    first_norm: str = ""  # of patches before the first layer; "" = none
    last_norm: str = ""  # after the last layer
    tapped: tuple[int, ...] = ()  # DeepStack: layers whose outputs are merged, too, for the first layers of the model
    names: Names = GATED
    merger: Merger = Joined()
    prefix: str = "visual."  # of the names in a checkpoint
    reading: Reading = READING
    token_id: int = -1  # the token that stands for each row of output in a prompt; -1 = config.json names none
    videos: Timed | None = None  # None: it reads none
    sees_all: bool = False  # the tokens of an image see each other in the language model

    @property
    def attention_bias(self) -> bool:
        """Whether the linears of q, k and v have a bias."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def unit(self) -> int:
        """The side in pixels of the square that one row of output stands for."""
        return self.merge_size * self.patch_size

    @property
    def window_cells(self) -> int:
        """The side of a window in rows of output; 0 = the whole image."""
        return self.window_size // self.unit

    def linear(self, name: str, out: int, size: int, *, bias: bool) -> Shapes:
        """Shapes of a linear's tensors."""
        return {f"{name}.weight": (out, size)} | ({f"{name}.bias": (out,)} if bias else {})

    def norm(self, name: str, size: int) -> Shapes:
        """Shapes of a norm's tensors."""
        return {f"{name}.{kind}": (size,) for kind in (("weight", "bias") if self.layer_norm else ("weight",))}

    def shapes(self, width: int) -> Shapes:
        """Shapes of all tensors by their names after the prefix, for a language model of this width."""
        hidden, inner, names = self.hidden_size, self.inner_size, self.names
        frames = (self.temporal_patch_size,) if self.temporal_patch_size else ()
        found: Shapes = {f"{names.patch}.weight": (hidden, self.channels, *frames, self.patch_size, self.patch_size)}
        found |= {f"{names.patch}.bias": (hidden,)} if self.patch_bias else {}
        if names.first:
            found |= {names.first: (1, 1, hidden), names.positions: (1, self.positions**2 + 1, hidden)}
        elif self.positions:
            found |= {f"{names.positions}.weight": (self.positions**2, hidden)}
        for name in filter(None, (self.first_norm, self.last_norm)):
            found |= self.norm(name, hidden)
        for layer in map(names.layer.format, range(self.num_layers)):
            for name in names.norms:
                found |= self.norm(layer + name, hidden)
            found |= {layer + name: (hidden,) for name in names.scales}
            for name in names.attention:
                outputs = 3 * hidden // len(names.attention)
                found |= self.linear(layer + name, outputs, hidden, bias=self.attention_bias)
            sizes = {names.attention_out: (hidden, hidden)}
            sizes |= dict.fromkeys(names.mlp[:-1], (inner, hidden)) | {names.mlp[-1]: (hidden, inner)}
            for name, shape in sizes.items():
                found |= self.linear(layer + name, *shape, bias=self.bias)
        return found | self.merger.shapes(self, width)
