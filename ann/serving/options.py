"""The limits of a server, and the digest of its token."""

import hashlib
import secrets
from dataclasses import InitVar, dataclass, field

from memhier.arguments import check_int, check_number

__all__ = ["ServingOptions"]

_TOKEN_LEAST = 8


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """The limits of a server. A request beyond one is refused before anything is searched.

    The server holds at most `max_requests` bodies of `max_body` bytes, and several times that while it parses JSON.

    Attributes
    ----------
    max_vectors
        Query vectors of one request.
    max_k
        Neighbours of one query.
    max_hits
        Vectors times neighbours of one request.
    max_body
        Bytes of the body of one request.
    max_requests
        Requests that run or wait at a time. Further ones are told to come back in a second.
    max_batch
        Query vectors of one search, into which requests with equal options are joined. A request with more is searched
        alone.
    searches
        Searches that run at a time.
    refresh_seconds
        Seconds after which the server looks for a newer commit of the index; None keeps the commit of its start.
    token
        A text that requests have to carry, of at least 8 characters; None where any request is answered. Its digest
        alone is kept.

    Examples
    --------
    >>> from memhier.ann.serving import ServingOptions
    >>> options = ServingOptions(max_vectors=64, token="a long secret")
    >>> options.knows("a long secret"), options.knows("another")
    (True, False)
    """

    max_vectors: int = 1024
    max_k: int = 1000
    max_hits: int = 65536
    max_body: int = 8 << 20
    max_requests: int = 128
    max_batch: int = 256
    searches: int = 2
    refresh_seconds: float | None = None
    token: InitVar[str | None] = None
    token_digest: bytes | None = field(init=False, repr=False)

    def __post_init__(self, token: str | None) -> None:
        for name in ("max_vectors", "max_k", "max_hits", "max_body", "max_requests", "max_batch", "searches"):
            check_int(name, getattr(self, name), 1)
        if self.refresh_seconds is not None:
            check_number("refresh_seconds", self.refresh_seconds, 0, above=True)
        if token is not None and len(token) < _TOKEN_LEAST:
            raise ValueError(f"token has {len(token)} characters: expected at least {_TOKEN_LEAST}")
        object.__setattr__(self, "token_digest", None if token is None else _digest(token))

    def knows(self, token: str) -> bool:
        """Return whether this is the token, in the same time for any other; True where there is none."""
        return self.token_digest is None or secrets.compare_digest(_digest(token), self.token_digest)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
