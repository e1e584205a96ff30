"""What a vocabulary is, by content. Standard library only, so that export and runtime share it."""

import hashlib
from collections.abc import Mapping


def vocab_digest(table: Mapping[int, str]) -> str:
    """The sha256 of an id -> token table as hex; equal for equal tables, whatever their order.

    Each entry is hashed as `id:length:token` with the token in UTF-8, so no two tables share a spelling.
    """
    digest = hashlib.sha256()
    for token_id in sorted(table):
        token = table[token_id].encode("utf-8", "surrogatepass")
        digest.update(b"%d:%d:" % (token_id, len(token)))
        digest.update(token)
    return digest.hexdigest()
