"""The devices: what configuration, layers, loading and the memory plan ask of one. No torch, and no device is touched.

Names of users and of ops (kernels.registry) are looked up here, once. A new device is an entry of DEVICES, its kernels,
and what an engine does with it (turbo.runners.device).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType


@dataclass(frozen=True)
class Device:
    """What is known of a device before there is one."""

    name: str  # as users name it, and as its kernels are registered
    tensors: str  # torch's type of device
    block_size: int  # tokens in a KV block, if no size is given
    step_tokens: int  # tokens in a step, if no number is given
    # What processes take beside the memory plan, from when it is made.
    runtime_bytes: int
    kv_share: float  # of the memory left after the weights, if the user gives no budget
    # Without a budget, also the most that the batch's KV takes of all that is available: a host's memory is for others.
    guest_share: float
    own_memory: bool  # weights, KV and activations lie in memory of its own; the host's is beside it
    half_activations: bool  # linears and attention pass on the dtype of dense weights, which has 16 bits; else float32
    activations: str  # what `auto` rounds inputs of quantized linears to; auto: the format of each weight decides
    exact_coded_heads: bool  # inputs of a head in codes keep 16 bits
    shares_head: bool  # embeddings can be the rows of a packed head
    float4: bool  # kernels take codes of float4 in groups of 16; elsewhere such weights become dense
    exact_float4: bool  # codes of float4 stay in 4 bits whatever inputs are rounded to, and have no zeros
    planes: bool  # kernels take what a CPU keeps in planes of bits; elsewhere such weights become dense
    small_groups: bool  # kernels take any codes in groups of 16; elsewhere those with plain scales become dense
    panels: bool  # additions of adapters lie in panels, in the order of rows; else rows of one adapter lie together
    plain_heads: bool  # prompts of latent attention may be computed over plain keys and values
    chooses_keys: bool  # contexts in which indexers choose keys are served; else those in which they choose all
    copies: bool  # packed weights may have copies in 16 bits
    moves_states: bool  # recurrent states can be copied to tiers
    drafts_with_ranks: bool  # a head or model drafts for a model that several ranks share
    invariant: bool  # a row's bits do not depend on the rows beside it, whatever the options are
    max_ranks: int
    # With less free memory, steps have so many tokens and sequences, if no numbers are given: the rest is for KV.
    small_memory: int = 0  # bytes
    small_step: tuple[int, int] = (0, 0)
    widths: tuple[int, ...] = ()  # the bits that codes in planes take, if they have no planes here
    # Options of the engine that it refuses, and why. `{shared}` is the option that shares the model, as NAME=NUMBER.
    refuses: Mapping[str, str] = field(default_factory=dict)


CPU = Device(
    name="cpu",
    tensors="cpu",
    block_size=32,
    step_tokens=512,
    # Measured with `lmkit serve`: 60 MiB for the pages of libraries and compiled code that stay in use, which free
    # memory counts as free, 25 MiB for what the engine allocates later, and 40 MiB for what the front end and its
    # helpers still take.
    runtime_bytes=128 << 20,
    kv_share=0.8,
    guest_share=0.25,
    own_memory=False,
    half_activations=False,
    activations="int8",
    exact_coded_heads=True,
    shares_head=True,
    float4=True,
    exact_float4=False,
    planes=True,
    small_groups=True,
    panels=True,
    plain_heads=False,
    chooses_keys=True,
    copies=False,
    moves_states=True,
    drafts_with_ranks=True,
    invariant=True,
    max_ranks=64,
    refuses=MappingProxyType({"devices": "devices={devices} names GPUs of ranks: use --device cuda"}),
)
CUDA = Device(
    name="cuda",
    tensors="cuda",
    block_size=64,
    step_tokens=4096,
    runtime_bytes=400 << 20,  # cuBLAS, kernels and the bytes that torch's cache rounds up
    kv_share=0.92,
    guest_share=1.0,
    own_memory=True,
    half_activations=True,
    activations="auto",
    exact_coded_heads=False,
    shares_head=False,
    float4=True,
    exact_float4=True,
    planes=True,
    small_groups=False,
    panels=False,
    plain_heads=True,
    chooses_keys=False,
    copies=True,
    moves_states=False,
    drafts_with_ranks=False,
    invariant=False,
    small_memory=10 << 30,
    small_step=(1024, 16),
    max_ranks=8,  # kernels/cuda/csrc/ranks.cu has numbers of all of them in registers
    widths=(4, 6, 8),
    refuses=MappingProxyType(
        {
            "weights_memory": "weights_memory is for --device cpu; a GPU keeps all weights in its own memory",
            "cluster": "cluster={cluster} is for --device cpu; on GPUs all ranks are on one machine",
        }
    ),
)
DEVICES = {device.name: device for device in (CPU, CUDA)}
# Where torch's own operations compute, for a quantization: `torch:cuda:1`.
TORCH = replace(CUDA, name="torch", plain_heads=False, float4=False, exact_float4=False, planes=False)


def named(name: str) -> Device:
    """The device of layers and ops: a name of DEVICES, or `torch:` with any of torch's."""
    return DEVICES.get(name, TORCH)


def holding(tensors: object) -> Device:
    """The device with tensors on this device of torch: a torch.device or its text."""
    kind = str(tensors).partition(":")[0]
    return next((device for device in DEVICES.values() if device.tensors == kind), TORCH)
