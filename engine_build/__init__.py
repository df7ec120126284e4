"""From a checkpoint to an engine directory. See README.md."""

__version__ = "0.1.0"
