"""Three instances in network namespaces of their own, and cables between them that can be cut.

```
 sender 10.77.1.1 ═══ cable "sender" ═══ 10.77.1.2 receiver 10.77.2.2 ═══ cable "other" ═══ 10.77.2.1 other sender
```
To be run as root of a user namespace: `unshare -Urn`. Prints a line of JSON for each finding.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

from tests.faults.isolated_instance import NUM_BLOCKS

# Bytes go over TCP: shared memory would not notice that a cable is cut. UCX sees to it that a dead peer is noticed.
_TRANSPORT = {"UCX_TLS": "tcp", "UCX_KEEPALIVE_INTERVAL": "1s", "UCX_TCP_KEEPINTVL": "1s", "UCX_TCP_KEEPCNT": "2"}


_INSTANCE = [sys.executable, "-m", "tests.faults.isolated_instance"]


class Isolated:
    """An instance's process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            # UCX looks for interfaces in /sys, which shows those of the namespace it was mounted in.
            ["unshare", "-nm", "sh", "-c", 'mount -t sysfs sysfs /sys && exec "$@"', "sh", *_INSTANCE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | _TRANSPORT,
        )

    def start(self, listen: str) -> None:
        self.ip("link", "set", "lo", "up")
        self.ask(listen)

    def ip(self, *arguments: str) -> None:
        subprocess.run(["nsenter", "-t", str(self.process.pid), "-n", "ip", *arguments], check=True)

    def ask(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def plug(self, cable: str, address: str) -> None:
        """Give it the end of a cable."""
        subprocess.run(["ip", "link", "set", cable, "netns", str(self.process.pid)], check=True)
        self.ip("addr", "add", f"{address}/24", "dev", cable)
        self.ip("link", "set", cable, "up")


def wait_for_namespaces(*instances: Isolated) -> None:
    """`unshare` needs a moment; until then its process is in our namespace."""
    own = os.readlink("/proc/self/ns/net")
    deadline = time.monotonic() + 10
    while any(os.readlink(f"/proc/{each.process.pid}/ns/net") == own for each in instances):
        assert time.monotonic() < deadline, "no network namespaces"
        time.sleep(0.01)


def find(**found: object) -> None:
    print(json.dumps(found), flush=True)


def main() -> None:
    sender, receiver, other = (Isolated() for _ in range(3))
    wait_for_namespaces(sender, receiver, other)
    for name, peer, number in (("sender", sender, 1), ("other", other, 2)):
        subprocess.run(["ip", "link", "add", f"{name}0", "type", "veth", "peer", "name", f"{name}1"], check=True)
        peer.plug(f"{name}0", f"10.77.{number}.1")
        receiver.plug(f"{name}1", f"10.77.{number}.2")
    sender.start("10.77.1.1:0")
    other.start("10.77.2.1:0")
    receiver.start("127.0.0.1:0")

    def fetch(peer: Isolated, num_tokens: int) -> dict[str, Any]:
        return receiver.ask(f"fetch {peer.ask(f'offer {num_tokens}')['state']}")

    def missing_blocks(instance: Isolated) -> int:
        """Blocks that cannot be had again within 10 seconds."""
        deadline = time.monotonic() + 10
        while (missing := NUM_BLOCKS - instance.ask("free")["free"]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return missing

    find(what="before", **fetch(sender, 64))
    find(what="others before", **fetch(other, 64))

    state = sender.ask("offer 7000")["state"]
    cut = threading.Timer(0.02, sender.ip, ("link", "set", "sender0", "down"))
    cut.start()
    find(what="cut while blocks come", **receiver.ask(f"fetch {state}"))
    cut.join()
    find(what="others meanwhile", **fetch(other, 200))
    find(what="receiver", missing_blocks=missing_blocks(receiver))
    find(what="cut before it is asked", **fetch(sender, 64))

    sender.ip("link", "set", "sender0", "up")
    deadline = time.monotonic() + 30
    while not (healed := fetch(sender, 64))["is_whole"] and time.monotonic() < deadline:
        time.sleep(0.5)
    find(what="healed", **healed)
    find(what="sender", missing_blocks=missing_blocks(sender))
    for each in (sender, receiver, other):
        each.process.kill()


if __name__ == "__main__":
    main()
