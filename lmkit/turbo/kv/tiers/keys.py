"""Keys of KV blocks by their content. The KV of a token depends on all tokens before it, so keys form a chain:

    root  = sha256(KV identity, tenant, salt)               the identity tells what computes and stores the KV
    key_0 = sha256(root + tokens of block 0)
    key_i = sha256(key_{i-1} + tokens of block i)          tokens as little-endian int32

If the layers form several groups (models.kv_layout), a block holds one group. The last two bytes of its key are then
the group's number.

Equal keys mean equal KV. Without a tenant's salt nobody can name, find or time its blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

KEY_BYTES = 32
FORMAT = b"lmkit kv 1"  # version of the keys and of the records stored under them


def root_key(identity: bytes, tenant: str, salt: str) -> bytes:
    """The root of the key chains of all sequences of one tenant and salt."""
    digest = hashlib.sha256(FORMAT)
    for part in (identity, tenant.encode("utf-8", "surrogatepass"), salt.encode("utf-8", "surrogatepass")):
        digest.update(len(part).to_bytes(8, "little") + part)  # with lengths, so that no part runs into the next
    return digest.digest()


def block_keys(root: bytes, tokens: np.ndarray, block_size: int, known: list[bytes]) -> None:
    """Extend `known`, the keys of the first blocks in order, to all full blocks of `tokens` int32 [n]."""
    done, full = len(known) * block_size, len(tokens) // block_size * block_size
    data = np.ascontiguousarray(tokens[done:full], dtype="<i4").tobytes()
    key, size = known[-1] if known else root, 4 * block_size
    for start in range(0, len(data), size):
        key = hashlib.sha256(key + data[start : start + size]).digest()
        known.append(key)


def group_keys(keys: Sequence[bytes], groups: Iterable[int]) -> list[bytes]:
    """The keys of the groups' blocks, ordered by tokens first."""
    ends = [group.to_bytes(2, "big") for group in groups]
    return [key[:-2] + end for key in keys for end in ends]
