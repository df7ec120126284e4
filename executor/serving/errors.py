"""Errors of a server as a whole. Errors of a request are `executor.api.errors`."""

from __future__ import annotations


class BindError(Exception):
    """The server cannot listen on an address: names it and the reason."""
