"""Several processes and devices: named for scripts, not offered.

Names, order and defaults follow `tensorrt_llm.bindings.executor`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

ONE_DEVICE = "one process drives one device"


class CommunicationType(IntEnum):
    MPI = 0


class CommunicationMode(IntEnum):
    LEADER = 0
    ORCHESTRATOR = 1


@dataclass(slots=True)
class OrchestratorConfig:
    is_orchestrator: bool = True
    worker_executable_path: str = ""
    orch_leader_comm: Any = None
    spawn_processes: bool = True


@dataclass(slots=True)
class ParallelConfig:
    communication_type: CommunicationType = CommunicationType.MPI
    communication_mode: CommunicationMode = CommunicationMode.LEADER
    device_ids: list[int] | None = None
    participant_ids: list[int] | None = None
    orchestrator_config: OrchestratorConfig | None = None
    num_nodes: int | None = None
