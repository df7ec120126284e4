"""Threads that give way to the engine."""

from __future__ import annotations

import os
import threading

_NICENESS = 10
"""A tenth of a core where the engine wants all of them, a whole one where it does not."""


def give_way() -> None:
    """Let the calling thread give way: copying for others must not hold up who decodes.

    Where the system has no niceness for single threads it is left as it is.
    """
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
