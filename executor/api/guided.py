"""Grammars that outputs follow. Names, order and defaults follow `tensorrt_llm.bindings.executor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from executor.api.errors import InvalidRequestError
from executor.api.support import accepted


class GuideType(IntEnum):
    JSON = 0
    JSON_SCHEMA = 1
    REGEX = 2
    EBNF_GRAMMAR = 3
    STRUCTURAL_TAG = 4


@dataclass(slots=True)
class GuidedDecodingParams:
    """A grammar that the output follows. `guide` is its text; `JSON` (any JSON value) needs none."""

    guide_type: GuideType
    guide: str | None = None
    GuideType: ClassVar[type[GuideType]] = GuideType

    def __post_init__(self) -> None:
        if not self.guide and self.guide_type is not GuideType.JSON:
            raise InvalidRequestError(
                f"guided_decoding_params.guide is empty; {GuideType(self.guide_type).name} needs one",
                field="guided_decoding_params.guide",
            )


class GuidedDecodingBackend(IntEnum):
    XGRAMMAR = 0
    LLGUIDANCE = 1


@dataclass(slots=True)
class GuidedDecodingConfig:
    """Lets requests bring grammars. The tokenizer is that of the engine directory."""

    backend: GuidedDecodingBackend = accepted(GuidedDecodingBackend.LLGUIDANCE, "llguidance follows every grammar")
    encoded_vocab: list[str] | None = None
    """The tokens' own spellings, by id: compared with the engine directory's tokenizer."""
    tokenizer_str: str | None = accepted(None, "the engine directory's tokenizer says it all")
    stop_token_ids: list[int] | None = None
    """Tokens that end an output; `None`: those that the engine directory names."""
    GuidedDecodingBackend: ClassVar[type[GuidedDecodingBackend]] = GuidedDecodingBackend
