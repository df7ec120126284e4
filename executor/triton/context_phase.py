"""`ContextPhaseParams` as the tensor `context_phase_params`: bytes that clients hand from one model to another.

They are the message of the same name of `inflight.v1`, so what came over gRPC can be continued through Triton.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from executor.api.errors import InvalidRequestError
from executor.api.request import ContextPhaseParams
from protos.inflight.v1 import inference_pb2 as pb

_FIELD = "context_phase_params"


def to_tensor(params: ContextPhaseParams) -> Any:
    """As uint8 `[n]`."""
    message = pb.ContextPhaseParams(
        first_gen_tokens=params.first_gen_tokens,
        req_id=params.req_id,
        opaque_state=params.opaque_state or b"",
        draft_tokens=params.draft_tokens or (),
    )
    return np.frombuffer(message.SerializeToString(), np.uint8)


def from_tensor(values: Any) -> ContextPhaseParams | None:
    """From uint8 of any shape; `None` where there are none.

    Raises:
        InvalidRequestError: they are not what `to_tensor` made.
    """
    if values is None or values.size == 0:
        return None
    try:
        message = pb.ContextPhaseParams.FromString(values.astype(np.uint8).tobytes())
    except DecodeError:
        raise InvalidRequestError(
            f"{_FIELD} cannot be read; hand on what the context-only request returned", field=_FIELD
        ) from None
    return ContextPhaseParams(
        list(message.first_gen_tokens),
        message.req_id,
        message.opaque_state or None,
        list(message.draft_tokens) or None,
    )
