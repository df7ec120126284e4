"""Speculation and decoding modes. Names, order and defaults follow `tensorrt_llm.bindings.executor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto
from typing import Any

from executor.api.errors import InvalidRequestError
from executor.api.support import refused, supported

_DRAFT_MODEL = "draft models and draft heads are not offered yet"
_BY_TOKENS = (
    "a draft is accepted where it equals what is drawn, so that a seed gives the same tokens with any drafts; with "
    "acceptance by the ratio of probabilities it would not"
)
_THRESHOLD = (
    "upstream compares it with the ratio of probabilities that draft logits give; a fixed one lets drafts change the "
    "distribution of outputs"
)


class _Mode(Flag):
    AUTO = auto()
    TOP_K = auto()
    TOP_P = auto()
    BEAM_SEARCH = auto()
    MEDUSA = auto()
    LOOKAHEAD = auto()
    EXPLICIT_DRAFT_TOKENS = auto()
    EAGLE = auto()
    TOP_K_TOP_P = TOP_K | TOP_P


_NAMES = {
    _Mode.AUTO: "Auto",
    _Mode.TOP_K: "TopK",
    _Mode.TOP_P: "TopP",
    _Mode.TOP_K_TOP_P: "TopKTopP",
    _Mode.BEAM_SEARCH: "BeamSearch",
    _Mode.MEDUSA: "Medusa",
    _Mode.LOOKAHEAD: "Lookahead",
    _Mode.EXPLICIT_DRAFT_TOKENS: "ExplicitDraftTokens",
    _Mode.EAGLE: "Eagle",
}


class DecodingMode:
    """How an engine chooses tokens; immutable, made by the functions named after the modes.

    Every request here may use top-k, top-p and both, so `Auto`, `TopK`, `TopP` and `TopKTopP` mean the same.
    """

    __slots__ = ("_mode",)

    def __init__(self, mode: _Mode) -> None:
        self._mode = mode

    @staticmethod
    def Auto() -> DecodingMode:  # noqa: N802 - upstream's spelling, as below
        return DecodingMode(_Mode.AUTO)

    @staticmethod
    def TopK() -> DecodingMode:  # noqa: N802
        return DecodingMode(_Mode.TOP_K)

    @staticmethod
    def TopP() -> DecodingMode:  # noqa: N802
        return DecodingMode(_Mode.TOP_P)

    @staticmethod
    def TopKTopP() -> DecodingMode:  # noqa: N802
        return DecodingMode(_Mode.TOP_K_TOP_P)

    @staticmethod
    def BeamSearch() -> DecodingMode:  # noqa: N802
        return DecodingMode(_Mode.BEAM_SEARCH)

    @staticmethod
    def Medusa() -> DecodingMode:  # noqa: N802
        return DecodingMode(_Mode.MEDUSA)

    @staticmethod
    def Lookahead() -> DecodingMode:  # noqa: N802
        return DecodingMode(_Mode.LOOKAHEAD)

    @staticmethod
    def ExplicitDraftTokens() -> DecodingMode:  # noqa: N802
        return DecodingMode(_Mode.EXPLICIT_DRAFT_TOKENS)

    @staticmethod
    def Eagle() -> DecodingMode:  # noqa: N802
        return DecodingMode(_Mode.EAGLE)

    def isAuto(self) -> bool:  # noqa: N802
        return _Mode.AUTO in self._mode

    def isTopK(self) -> bool:  # noqa: N802
        return _Mode.TOP_K in self._mode

    def isTopP(self) -> bool:  # noqa: N802
        return _Mode.TOP_P in self._mode

    def isTopKorTopP(self) -> bool:  # noqa: N802
        return bool(_Mode.TOP_K_TOP_P & self._mode)

    def isTopKandTopP(self) -> bool:  # noqa: N802
        return _Mode.TOP_K_TOP_P in self._mode

    def isBeamSearch(self) -> bool:  # noqa: N802
        return _Mode.BEAM_SEARCH in self._mode

    def isMedusa(self) -> bool:  # noqa: N802
        return _Mode.MEDUSA in self._mode

    def isLookahead(self) -> bool:  # noqa: N802
        return _Mode.LOOKAHEAD in self._mode

    def isExplicitDraftTokens(self) -> bool:  # noqa: N802
        return _Mode.EXPLICIT_DRAFT_TOKENS in self._mode

    def isEagle(self) -> bool:  # noqa: N802
        return _Mode.EAGLE in self._mode

    def useVariableBeamWidthSearch(self) -> bool:  # noqa: N802
        """Always False: beam search is not offered."""
        return False

    @property
    def name(self) -> str:
        return _NAMES[self._mode]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DecodingMode) and self._mode is other._mode

    def __hash__(self) -> int:
        return hash(self._mode)

    def __repr__(self) -> str:
        return f"DecodingMode.{self.name}()"


@dataclass(slots=True)
class LookaheadDecodingConfig:
    """Speculation without a draft model: n-grams of the request's own tokens are proposed and verified.

    The sizes bound how many drafts a step verifies, as many as upstream's lookahead decoding would.
    """

    max_window_size: int = 4
    max_ngram_size: int = 3
    max_verification_set_size: int = 4

    @staticmethod
    def get_default_lookahead_decoding_window() -> int:
        return 4

    @staticmethod
    def get_default_lookahead_decoding_ngram() -> int:
        return 3

    @staticmethod
    def get_default_lookahead_decoding_verification_set() -> int:
        return 4

    @staticmethod
    def calculate_speculative_resource_tuple(
        max_window_size: int, max_ngram_size: int, max_verification_set_size: int
    ) -> tuple[int, int, int, int]:
        """Most tokens of a step, longest accepted path, most drafts of a step, longest accepted drafts."""
        num_drafts = max(0, max_ngram_size - 2)
        num_drafts += (max_window_size - 1 + max_verification_set_size) * (max_ngram_size - 1)
        return num_drafts + 1, max_ngram_size, num_drafts, max_ngram_size - 1

    def calculate_speculative_resource(self) -> tuple[int, int, int, int]:
        """`calculate_speculative_resource_tuple` of this configuration."""
        return self.calculate_speculative_resource_tuple(
            self.max_window_size, self.max_ngram_size, self.max_verification_set_size
        )


@dataclass(slots=True)
class EagleConfig:
    eagle_choices: list[list[int]] | None = None
    greedy_sampling: bool = True
    posterior_threshold: float | None = None
    use_dynamic_tree: bool = False
    dynamic_tree_max_topK: int | None = None  # noqa: N815 - upstream's spelling


@dataclass(slots=True)
class ExternalDraftTokensConfig:
    """Draft tokens proposed by the caller, verified in the step that ends the context.

    The request goes on after that step until it ends by itself, unlike upstream's, which ended there.
    """

    tokens: list[int]
    logits: Any = refused(None, _BY_TOKENS)
    acceptance_threshold: float | None = refused(None, _THRESHOLD)
    fast_logits: bool | None = refused(None, _DRAFT_MODEL)


@dataclass(slots=True)
class SpeculativeDecodingConfig:
    fast_logits: bool = False


@dataclass(slots=True)
class SpeculativeDecodingFastLogitsInfo:
    """Where a draft model's logits are; no result has one, since draft models are not offered yet."""

    draft_request_id: int = 0
    draft_participant_id: int = 0


@dataclass(slots=True)
class DecodingConfig:
    """How tokens are chosen, and the default speculation of requests that ask for none themselves.

    Setting one of the configurations sets `decoding_mode` to the mode it is for.
    """

    decoding_mode: DecodingMode | None = supported(
        None, "Auto, TopK, TopP, TopKTopP, which mean the same here, and Lookahead"
    )
    lookahead_decoding_config: LookaheadDecodingConfig | None = None
    medusa_choices: list[list[int]] | None = refused(None, _DRAFT_MODEL)
    eagle_config: EagleConfig | None = refused(None, _DRAFT_MODEL)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if value is not None and name in _MODE_OF:
            object.__setattr__(self, "decoding_mode", DecodingMode(_MODE_OF[name]))

    def validate(self) -> None:
        """Raise `InvalidRequestError` for a mode that no request here can have."""
        mode = self.decoding_mode
        if mode is not None and not (mode.isAuto() or mode.isTopKorTopP() or mode.isLookahead()):
            raise InvalidRequestError(
                f"decoding_mode is {mode.name}; offered are Auto, TopK, TopP, TopKTopP and Lookahead",
                field="decoding_config.decoding_mode",
            )


_MODE_OF = {
    "lookahead_decoding_config": _Mode.LOOKAHEAD,
    "medusa_choices": _Mode.MEDUSA,
    "eagle_config": _Mode.EAGLE,
}
