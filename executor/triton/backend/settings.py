"""What `config.pbtxt` says to a model, as Triton hands it over."""

from __future__ import annotations

import json
import re
from typing import Any

_UNFILLED = re.compile(r"\$\{[^}]*\}")
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


class ParameterError(ValueError):
    """A parameter is unknown, missing or cannot be read: one line that names it."""


def string_parameters(model_config: dict[str, Any]) -> dict[str, str]:
    """The parameters that are set. Empty ones, and `${...}` that no template tool has filled, count as not set."""
    parameters = {name: entry["string_value"] for name, entry in model_config.get("parameters", {}).items()}
    return {name: value for name, value in parameters.items() if value and not _UNFILLED.fullmatch(value)}


class Settings:
    """The configuration of a model of ours."""

    def __init__(self, args: dict[str, str], known: frozenset[str]) -> None:
        """Read what `initialize` was given.

        Raises:
            ParameterError: a parameter is not among `known`.
        """
        self.config: dict[str, Any] = json.loads(args["model_config"])
        self.model_name = args["model_name"]
        self.model_version = args["model_version"]
        self.is_decoupled: bool = self.config.get("model_transaction_policy", {}).get("decoupled", False)
        self.parameters = string_parameters(self.config)
        for name in self.parameters:
            if name not in known:
                raise ParameterError(
                    f"{self.model_name}: parameter {name} is unknown; known are {', '.join(sorted(known))}"
                )

    def text(self, name: str, default: str | None = None) -> str:
        """Raises `ParameterError` where it is not set and has no default."""
        value = self.parameters.get(name, default)
        if value is None:
            raise ParameterError(f"{self.model_name}: parameter {name} is not set")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.parameters.get(name)
        return default if value is None else parse_flag(name, value)

    def output_names(self) -> frozenset[str]:
        return frozenset(output["name"] for output in self.config["output"])


def parse_flag(name: str, value: str) -> bool:
    """A truth value; raises `ParameterError` for what is none."""
    word = value.lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ParameterError(f"parameter {name} is {value!r}; it must be true or false")
