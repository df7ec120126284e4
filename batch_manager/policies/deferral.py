"""A request whose first missing block another one is computing just now waits for it, instead of computing it too.

```
 contributor   [ cached | computing now ................................. ]
 follower      [ cached | same tokens ........ | other tokens ]
                          ▲ key of the first    ▲ wake: the contributor's
                            missing block         shared blocks are stored
```
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from batch_manager.request import Request, RequestState


class PrefixDeferral:
    """Contributors by the block they compute, and who waits for them."""

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._contributors: dict[Hashable, Request] = {}
        self._keys: dict[int, Hashable] = {}
        self._followers: dict[int, list[tuple[int, Request]]] = {}

    def contributor(self, key: Hashable | None) -> Request | None:
        """Who computes the block `key`."""
        return self._contributors.get(key) if key is not None else None

    def register(self, request: Request, key: Hashable | None) -> None:
        """`request` computes the block `key` (and what follows it) next."""
        previous = self._keys.pop(request.request_id, None)
        if previous is not None and self._contributors.get(previous) is request:
            del self._contributors[previous]
        if key is not None and key not in self._contributors:
            self._contributors[key] = request
            self._keys[request.request_id] = key

    def follow(self, follower: Request, contributor: Request, num_cached_tokens: int) -> None:
        """`follower`, which finds `num_cached_tokens` in the cache, waits until the prefix they share is stored."""
        size = self._tokens_per_block
        first_block_end = (num_cached_tokens // size + 1) * size
        shared = common_prefix_length(follower.token_ids, contributor.token_ids, first_block_end)
        self._followers.setdefault(contributor.request_id, []).append((shared - shared % size, follower))

    def advance(self, contributor: Request, num_stored_tokens: int) -> list[Request]:
        """Followers that need not wait any longer, now that the contributor has stored so many tokens."""
        waiting = self._followers.get(contributor.request_id)
        if waiting is None:
            return []
        woken = [follower for until, follower in waiting if until <= num_stored_tokens]
        if len(woken) == len(waiting):
            del self._followers[contributor.request_id]
        else:
            self._followers[contributor.request_id] = [entry for entry in waiting if entry[0] > num_stored_tokens]
        return [follower for follower in woken if follower.state is not RequestState.FINISHED]

    def end(self, contributor: Request) -> list[Request]:
        """The contributor's context is done, or it lost its blocks: all its followers."""
        self.register(contributor, None)
        followers = self._followers.pop(contributor.request_id, ())
        return [follower for _, follower in followers if follower.state is not RequestState.FINISHED]


def common_prefix_length(first: Sequence[int], second: Sequence[int], known: int) -> int:
    """How many leading tokens are equal; the first `known` are."""
    low, high = known, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
