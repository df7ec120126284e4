"""The calls of `inflight.v1.Transfer`."""

from __future__ import annotations

from google.protobuf.message import Message

from protos.inflight.v1 import transfer_pb2 as pb

METHODS: dict[str, tuple[type[Message], type[Message]]] = {
    "Describe": (pb.DescribeRequest, pb.DescribeResponse),
    "Open": (pb.OpenRequest, pb.OpenResponse),
    "Heartbeat": (pb.HeartbeatRequest, pb.HeartbeatResponse),
    "Close": (pb.CloseRequest, pb.CloseResponse),
    "Find": (pb.FindRequest, pb.FindResponse),
}
"""Message types of each call."""
