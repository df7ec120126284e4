"""What is checked of context-only and generation-only requests when they arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from executor.api.errors import InvalidRequestError, UnsupportedFeatureError, WrongRoleError
from executor.api.kv_cache_config import CacheTransceiverConfig
from executor.api.request import ContextPhaseParams, Request, RequestType
from executor.api.role import InstanceRole
from executor.transfer.context_state import ContextState
from executor.transfer.integrity import IdentityError, prompt_digest
from executor.transfer.layout import IncompatibleLayoutError, check_compatible

if TYPE_CHECKING:
    from executor.transfer.endpoint import TransferEndpoint

_TAKEN_BY = {
    InstanceRole.CONTEXT: {RequestType.REQUEST_TYPE_CONTEXT_ONLY},
    InstanceRole.GENERATION: {RequestType.REQUEST_TYPE_GENERATION_ONLY},
    InstanceRole.BOTH: set(RequestType),
}


class ContextIntake:
    """Knows the instance's role, and whether a context can come here at all. Safe to use from any thread."""

    def __init__(self, config: CacheTransceiverConfig | None, endpoint: TransferEndpoint | None) -> None:
        """`config` and `endpoint`: both `None` where the executor takes no part in transfers."""
        self._endpoint = endpoint
        self.role = InstanceRole.BOTH if config is None else InstanceRole(config.role)

    def change_role(self, role: InstanceRole) -> None:
        """Raises `InvalidRequestError` where the executor takes no part in transfers."""
        if self._endpoint is None:
            raise InvalidRequestError("a role needs a cache_transceiver_config", field="role")
        self.role = InstanceRole(role)

    def accept(self, request: Request, prompt: list[int], vocab_size: int) -> ContextState | None:
        """Check a request's type and what comes with it.

        Args:
            request: validated.
            prompt: its token ids.
            vocab_size: of the engine.

        Returns:
            Where the context of a generation-only request lies; `None` for others.

        Raises:
            RequestError: says why the request, or the context, cannot be taken here.
        """
        if self._endpoint is None and request.type is not RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION:
            raise UnsupportedFeatureError(
                f"type {request.type.name} is not supported: the executor was opened without a "
                "cache_transceiver_config",
                field="type",
            )
        if request.type not in _TAKEN_BY[self.role]:
            raise WrongRoleError(
                f"type is {request.type.name}; this instance's role is {self.role}, which takes "
                f"{', '.join(sorted(each.name for each in _TAKEN_BY[self.role]))}",
                field="type",
            )
        params = request.context_phase_params
        if params is None or self._endpoint is None:
            return None
        self._check_tokens(params, request, vocab_size)
        if params.opaque_state is None:
            raise InvalidRequestError(
                "context_phase_params.opaque_state is not set; hand on what the context-only request returned",
                field="context_phase_params.opaque_state",
            )
        state = ContextState.from_bytes(params.opaque_state)
        self._check_state(state, request, prompt, self._endpoint)
        return state

    def _check_tokens(self, params: ContextPhaseParams, request: Request, vocab_size: int) -> None:
        tokens = params.first_gen_tokens
        field = "context_phase_params.first_gen_tokens"
        if len(tokens) != 1 or not all(isinstance(token, int) and 0 <= token < vocab_size for token in tokens):
            raise InvalidRequestError(f"{field} is {tokens}; it must be one token id in [0, {vocab_size})", field=field)
        if request.max_tokens <= len(tokens):
            raise InvalidRequestError(
                f"max_tokens is {request.max_tokens}; the context-only request has generated as many, so it must be "
                f"at least {len(tokens) + 1}",
                field="max_tokens",
            )

    def _check_state(
        self, state: ContextState, request: Request, prompt: list[int], endpoint: TransferEndpoint
    ) -> None:
        field = "context_phase_params.opaque_state"
        if state.num_tokens != len(prompt) or state.prompt_digest != prompt_digest(prompt, request.cache_salt_id):
            raise InvalidRequestError(
                "context_phase_params are those of another prompt or cache_salt_id; both must be the context-only "
                "request's",
                field=field,
            )
        try:
            endpoint.identity.check_same(state.identity)
            check_compatible(state.layout, endpoint.layout)
        except (IdentityError, IncompatibleLayoutError) as error:
            raise InvalidRequestError(f"the context cannot be used by this instance: {error}", field=field) from error
        num_wanted = len(request.context_phase_params.first_gen_tokens) if request.context_phase_params else 0
        if request.output_config.return_log_probs and len(state.log_probs) != num_wanted:
            raise InvalidRequestError(
                "output_config.return_log_probs is set, but was not for the context-only request",
                field="output_config.return_log_probs",
            )
