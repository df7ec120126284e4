"""Which device an Executor runs on; several processes and devices are named for scripts, not offered.

Names, order and defaults follow `tensorrt_llm.bindings.executor`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from executor.api.errors import InvalidRequestError, UnsupportedFeatureError
from executor.api.support import refused, refused_members

ONE_DEVICE = "one process drives one device"


class CommunicationType(IntEnum):
    MPI = 0


@refused_members(ORCHESTRATOR=ONE_DEVICE)
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
    """One GPU, by the number CUDA gives it. `None`: the first."""
    participant_ids: list[int] | None = refused(None, ONE_DEVICE)
    orchestrator_config: OrchestratorConfig | None = refused(None, ONE_DEVICE)
    num_nodes: int | None = refused(None, ONE_DEVICE)

    def validate(self) -> None:
        """Raise a `RequestError` naming the first field that is wrong whatever the engine is."""
        field = "parallel_config.device_ids"
        if self.device_ids is None:
            return
        if len(self.device_ids) > 1:
            raise UnsupportedFeatureError(f"{field} is {self.device_ids}: {ONE_DEVICE}, so name one", field=field)
        if not self.device_ids or self.device_ids[0] < 0:
            raise InvalidRequestError(f"{field} is {self.device_ids}; it must hold one number, 0 or more", field=field)
