"""Finds stop strings in text that comes in pieces.

An automaton (Aho and Corasick, 1975) reads the text character by character. Its state is the longest end of the text
that begins some stop string, which is also exactly what must be held back:

```
stops "END", "\n\n"     text  "...the EN"    state "EN": 2 characters held back
                              "...the ENx"   state "":   nothing held back
                              "...the END"   stop, 3 characters long
```
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """Where a stop string ended."""

    end: int
    """In the text just scanned: index after the stop string's last character."""
    stop: str


class StopStrings:
    """A set of stop strings, ready to be looked for; shared by all streams that use it, never changed."""

    __slots__ = ("_depth", "_ends", "_next", "_suffix", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        """Build the automaton.

        Args:
            stops: in order of preference, for two that end at the same character.

        Raises:
            ValueError: a stop string is empty.
        """
        if any(stop == "" for stop in stops):
            raise ValueError("a stop string is empty; it must have at least one character")
        self.stops = tuple(stops)
        self._next: list[dict[str, int]] = [{}]
        self._suffix = [0]
        self._depth = [0]
        self._ends: list[int | None] = [None]
        """By state: the most preferred stop that ends there."""
        for index, stop in enumerate(self.stops):
            state = 0
            for character in stop:
                state = self._child(state, character)
            if self._ends[state] is None:
                self._ends[state] = index
        self._link()

    def scan(self, text: str, state: int) -> tuple[int, StopMatch | None]:
        """Read on from `state` (0 at the start of a text) to the end of `text` or the first stop string.

        Returns the new state and the stop string that was completed first, if one was.
        """
        for end, character in enumerate(text, 1):
            while state and character not in self._next[state]:
                state = self._suffix[state]
            state = self._next[state].get(character, 0)
            index = self._ends[state]
            if index is not None:
                return state, StopMatch(end, self.stops[index])
        return state, None

    def num_held(self, state: int) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        return self._depth[state]

    def _child(self, state: int, character: str) -> int:
        child = self._next[state].get(character)
        if child is None:
            child = len(self._next)
            self._next.append({})
            self._suffix.append(0)
            self._depth.append(self._depth[state] + 1)
            self._ends.append(None)
            self._next[state][character] = child
        return child

    def _link(self) -> None:
        """Find for every state its longest proper suffix that is a state too, shorter states first."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            self._ends[state] = _preferred(self._ends[state], self._ends[self._suffix[state]])
            for character, child in self._next[state].items():
                suffix = self._suffix[state]
                while suffix and character not in self._next[suffix]:
                    suffix = self._suffix[suffix]
                self._suffix[child] = self._next[suffix].get(character, 0)
                queue.append(child)


def _preferred(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return one if other is None else other
    return min(one, other)
