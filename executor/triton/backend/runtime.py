"""Files that a Triton server's models need while it runs: where they are, and who removes what a killed one has left.

```
TMPDIR/inflight-triton-UID-NAMESPACE/     private to the user, of processes that see each other
    PID-KEY.sock, .lock                   the socket of an executor process of the server PID
    PID-REGION.shm                        a shared memory region that the server PID made in /dev/shm
```
A server that ends in an orderly way removes its regions, and executor processes their sockets. When it is killed, its
instances do so. Should they be killed as well, the next server's do: the names say whose a file was.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_ORPHAN_CHECK_SECONDS = 0.5
_REGION_MARK = "_backend_shm_region_"


def server_process() -> int:
    """The process id of tritonserver, whose child each instance is."""
    return os.getppid()


def runtime_directory() -> Path:
    """The folder, made if need be.

    Raises:
        OSError: it is there, and open to others.
    """
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    directory = Path(tempfile.gettempdir()) / f"inflight-triton-{os.getuid()}-{namespace}"
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{directory} is not private to this user; remove it")
    return directory


def tidy_up() -> None:
    """Remove what servers that no longer run have left, and see to it that this instance leaves nothing.

    To be called once by each model instance.
    """
    remove_remains()
    region = _own_region()
    mark = runtime_directory() / f"{server_process()}-{region}.shm"
    mark.touch()
    threading.Thread(target=_end_with_server, args=[server_process(), region, mark], daemon=True).start()


def remove_remains() -> None:
    """Remove the files of servers that no longer run, and their shared memory."""
    for path in runtime_directory().iterdir():
        server = path.name.partition("-")[0]
        if server.isdigit() and not is_running(int(server)):
            if path.suffix == ".shm":
                _remove(_SHARED_MEMORY / path.stem.partition("-")[2])
            _remove(path)


def is_running(process: int) -> bool:
    return Path("/proc", str(process)).exists()


def _end_with_server(server: int, region: str, mark: Path) -> None:
    """End this process when the server's has ended: its threads may wait for an answer of the server for ever."""
    while os.getppid() == server:
        time.sleep(_ORPHAN_CHECK_SECONDS)
    _remove(_SHARED_MEMORY / region)
    _remove(mark)
    os._exit(1)


def _own_region() -> str:
    """The region's name is an argument of the process that runs an instance."""
    arguments = Path("/proc/self/cmdline").read_bytes().decode(errors="replace").split("\0")
    return next(argument.lstrip("/") for argument in arguments if _REGION_MARK in argument)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # another instance was faster
        path.unlink()
