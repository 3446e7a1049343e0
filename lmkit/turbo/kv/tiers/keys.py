"""Keys of KV blocks by their content. The KV of a token depends on all tokens before it, so keys form a chain:

    root  = sha256(KV identity, tenant, salt)               the identity tells what computes and stores the KV
    key_0 = sha256(root + tokens of block 0)
    key_i = sha256(key_{i-1} + tokens of block i)          tokens as little-endian int32

A token of an image is -1 in its block. The digests of the images follow the tokens of the block, one for each such
token.

If the layers form several groups (models.kv_layout), a block holds one group. The last two bytes of its key are then
the group's number.

Equal keys mean equal KV. Without a tenant's salt nobody can name, find or time its blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

KEY_BYTES = 32
FORMAT = b"lmkit kv 1"  # version of the keys and of the records stored under them


def root_key(identity: bytes, tenant: str, salt: str) -> bytes:
    """The root of the key chains of all sequences of one tenant and salt."""
    digest = hashlib.sha256(FORMAT)
    for part in (identity, tenant.encode("utf-8", "surrogatepass"), salt.encode("utf-8", "surrogatepass")):
        digest.update(len(part).to_bytes(8, "little") + part)  # with lengths, so that no part runs into the next
    return digest.digest()


def block_keys(
    root: bytes,
    tokens: np.ndarray,
    block_size: int,
    known: list[bytes],
    digests: Mapping[int, bytes] = MappingProxyType({}),
) -> None:
    """Extend `known`, the keys of the first blocks in order, to all full blocks of `tokens` int32 [n].

    A negative token belongs to an image, whose digest is in `digests`.
    """
    done, full = len(known) * block_size, len(tokens) // block_size * block_size
    rest = np.ascontiguousarray(tokens[done:full], dtype="<i4")
    data = np.maximum(rest, -1).tobytes() if digests else rest.tobytes()
    key, size = known[-1] if known else root, 4 * block_size
    for start in range(0, len(data), size):
        content = data[start : start + size]
        if digests:
            block = rest[start // 4 : start // 4 + block_size]
            content += b"".join(digests[token] for token in block[block < 0].tolist())
        key = hashlib.sha256(key + content).digest()
        known.append(key)


def state_keys(key: bytes, count: int) -> list[bytes]:
    """The keys of the parts of the recurrent state after the block that has this key."""
    return [hashlib.sha256(key + b"state %d" % part).digest() for part in range(count)]


def group_keys(keys: Sequence[bytes], groups: Iterable[int]) -> list[bytes]:
    """The keys of the groups' blocks, ordered by tokens first."""
    ends = [group.to_bytes(2, "big") for group in groups]
    return [key[:-2] + end for key in keys for end in ends]
