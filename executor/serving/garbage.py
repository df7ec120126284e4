"""Garbage collection for a serving process.

What a token allocates dies by its reference counts; cycles are rare. Looking for them at Python's default pace costs
about a tenth of the service's time per token, most of it spent on walking libraries that never change.
"""

from __future__ import annotations

import gc

_YOUNG_OBJECTS = 20_000
_YOUNG_COLLECTIONS = 20
_MIDDLE_COLLECTIONS = 50


def settle_garbage_collector() -> None:
    """Call once, when everything that stays has been loaded: what there is now is not looked at again, and what comes
    is looked at less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_COLLECTIONS, _MIDDLE_COLLECTIONS)
