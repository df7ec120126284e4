"""A request whose first missing block another one is computing just now waits for it, instead of computing it too.

```
 contributor   [ cached | computing now ................................. ]
 follower      [ cached | same tokens ........ | other tokens ]
                          ▲ key of the first    ▲ wake: the contributor's
                            missing block         shared blocks are stored
```
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from batch_manager.request import Request, RequestState


class PrefixDeferral:
    """Contributors by the block they compute, and who waits for them.

    A contributor goes by the first block that is missing of its tokens. While its context goes on in chunks that is
    another block after each of them; which one is looked up (`missing_key`) only when somebody may want it.
    """

    def __init__(self, tokens_per_block: int, missing_key: Callable[[Request], Hashable | None]) -> None:
        self._tokens_per_block = tokens_per_block
        self._missing_key = missing_key
        self._contributors: dict[Hashable, Request] = {}
        self._keys: dict[int, Hashable] = {}
        """By request id, the key under which a contributor is registered."""
        self._advanced: dict[int, Request] = {}
        """Contributors that have computed a chunk since they were registered."""
        self._followers: dict[int, list[tuple[int, Request]]] = {}

    def contributor(self, key: Hashable | None) -> Request | None:
        """Who computes the block `key`."""
        if key is None:
            return None
        if self._advanced:
            for request in self._advanced.values():
                self._unregister(request)
                self.register(request, self._missing_key(request))
            self._advanced.clear()
        return self._contributors.get(key)

    def register(self, request: Request, key: Hashable | None) -> None:
        """`request` computes the block `key` (and what follows it) next."""
        if key is not None and key not in self._contributors:
            self._contributors[key] = request
            self._keys[request.request_id] = key

    def _unregister(self, request: Request) -> None:
        key = self._keys.pop(request.request_id, None)
        if key is not None:
            del self._contributors[key]

    def follow(self, follower: Request, contributor: Request, num_cached_tokens: int) -> None:
        """`follower`, which finds `num_cached_tokens` in the cache, waits until the prefix they share is stored."""
        size = self._tokens_per_block
        shared = (num_cached_tokens // size + 1) * size
        if not follower.multimodal_spans and not contributor.multimodal_spans:
            shared = common_prefix_length(follower.token_ids, contributor.token_ids, shared)
        self._followers.setdefault(contributor.request_id, []).append((shared - shared % size, follower))

    def advance(self, contributor: Request, num_stored_tokens: int) -> list[Request]:
        """Followers that need not wait any longer, now that the contributor has stored so many tokens of its context
        and goes on."""
        self._advanced[contributor.request_id] = contributor
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
        self._unregister(contributor)
        self._advanced.pop(contributor.request_id, None)
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
