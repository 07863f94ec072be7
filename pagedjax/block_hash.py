"""Names of block contents: chained hashes that two different prefixes cannot share.

    root     = H(version of the weights, adapter, salt)
    hash[i]  = H(hash[i - 1], token ids of block i)

A hash thus stands for everything that the keys and values of a block depend on: all tokens up to
its last one and the weights they were computed with. H is BLAKE2b with 256 bits, so equal hashes
mean equal prefixes, and nobody can make up a prompt that meets another's hash.
"""

import hashlib
import json
from array import array
from collections.abc import Sequence


def root_hash(
    weights_version: int, *, adapter_id: str | None = None, cache_salt: str | None = None
) -> bytes:
    """The hash of the empty prefix: requests with different roots share no block.

    Args:
      weights_version: counts changes of the weights.
      adapter_id: names adapter weights, a reloaded adapter being a new name.
      cache_salt: a secret of the tenant, without which its cached prefixes cannot be probed.
    """
    extra = json.dumps([weights_version, adapter_id, cache_salt])  # unambiguous, unlike a join
    return hashlib.blake2b(extra.encode(), digest_size=32, person=b"root").digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full block behind `parent`, the hash of the block before it or the root."""
    tokens = array("q", token_ids).tobytes()
    return hashlib.blake2b(parent + tokens, digest_size=32, person=b"block").digest()


def private_root(arrival: int) -> bytes:
    """A root that no other request has: `arrival` numbers the requests of an engine."""
    return hashlib.blake2b(str(arrival).encode(), digest_size=32, person=b"private").digest()
