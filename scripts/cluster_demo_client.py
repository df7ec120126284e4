"""Starts a cluster and shows what it does; see scripts/cluster_demo."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from dynamo_cluster import ClusterError, DynamoCluster
from rich.console import Console
from rich.table import Table

MODEL = "smollm2"
NUM_INSTANCES = 3
TOPICS = ("the sea", "a mountain", "a railway", "a garden")
NUM_TURNS = 3
NUM_STREAMS = 6
STREAM_TOKENS = 160
KILL_AFTER = 40
"""Tokens of each stream, when an instance is killed."""

console = Console()


class LostRequestError(RuntimeError):
    """A stream ended with an error."""


@dataclass
class Answer:
    """What came back for one request."""

    text: str = ""
    worker_id: int = 0
    """Of the instance that it was first sent to."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_chunks: int = 0
    longest_gap: float = 0.0
    """Seconds between two chunks."""
    finish_reason: str | None = None
    first_chunk: asyncio.Event = field(default_factory=asyncio.Event)


async def ask(session: aiohttp.ClientSession, messages: list[dict[str, str]], max_tokens: int, answer: Answer) -> None:
    """Greedy; fills `answer` while it streams. Raises when the request is lost."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "nvext": {"extra_fields": ["worker_id"]},
    }
    async with session.post("/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        last = time.monotonic()
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line[6:])
            if "choices" not in chunk:
                raise LostRequestError(f"instead of a chunk came {chunk}")
            now = time.monotonic()
            if answer.num_chunks:
                answer.longest_gap = max(answer.longest_gap, now - last)
            last = now
            workers = (chunk.get("nvext") or {}).get("worker_id") or {}
            answer.worker_id = answer.worker_id or workers.get("decode_worker_id") or 0
            for choice in chunk["choices"]:
                answer.text += choice["delta"].get("content") or ""
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                answer.num_chunks += 1
                answer.first_chunk.set()
            if chunk.get("usage"):
                answer.prompt_tokens = chunk["usage"]["prompt_tokens"]
                answer.cached_tokens = (chunk["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def show_routing(session: aiohttp.ClientSession, names: dict[int, str]) -> bool:
    """Conversations that grow: each turn should go to where the turns before it are cached."""
    console.print("\n[bold]Cache-aware routing[/]: four conversations, begun at once, then turn by turn")
    table = Table("turn", *TOPICS, title="instance: cached of prompt tokens")
    talks: dict[str, list[dict[str, str]]] = {topic: [] for topic in TOPICS}
    homes: dict[str, set[str]] = {topic: set() for topic in TOPICS}

    async def take_turn(topic: str, turn: int) -> str:
        talk, answer = talks[topic], Answer()
        talk.append(user(f"Part {turn}: tell me something about {topic}, in some detail, please. " * 4))
        await ask(session, talk, 24, answer)
        talk.append({"role": "assistant", "content": answer.text})
        name = names.get(answer.worker_id, "?")
        homes[topic].add(name)
        return f"{name}: {answer.cached_tokens} of {answer.prompt_tokens}"

    table.add_row("1", *await asyncio.gather(*(take_turn(topic, 1) for topic in TOPICS)))
    for turn in range(2, NUM_TURNS + 1):
        await asyncio.sleep(0.5)  # cache events are on their way
        table.add_row(str(turn), *[await take_turn(topic, turn) for topic in TOPICS])
    console.print(table)
    stayed = sum(len(instances) == 1 for instances in homes.values())
    spread = len(set().union(*homes.values()))
    console.print(f"{stayed} of {len(TOPICS)} conversations stayed where they were; {spread} instances were used")
    return stayed == len(TOPICS)


async def stream_all(session: aiohttp.ClientSession, answers: list[Answer]) -> None:
    prompts = [
        user(f"Story number {number}: write a long story about {TOPICS[number % 4]}.") for number in range(NUM_STREAMS)
    ]
    await asyncio.gather(
        *(ask(session, [prompt], STREAM_TOKENS, answer) for prompt, answer in zip(prompts, answers, strict=True))
    )


async def show_kill(session: aiohttp.ClientSession, cluster: DynamoCluster, names: dict[int, str]) -> bool:
    """Streams go on when the instance that serves most of them is killed."""
    console.print(f"\n[bold]A killed instance[/]: {NUM_STREAMS} streams of {STREAM_TOKENS} tokens, twice")
    undisturbed = [Answer() for _ in range(NUM_STREAMS)]
    await stream_all(session, undisturbed)
    answers = [Answer() for _ in range(NUM_STREAMS)]
    streams = asyncio.create_task(stream_all(session, answers))
    while min(answer.num_chunks for answer in answers) < KILL_AFTER and not streams.done():
        await asyncio.sleep(0.02)
    victim, count = Counter(answer.worker_id for answer in answers).most_common(1)[0]
    cluster.worker(victim).kill()
    console.print(f"killed instance {names[victim]}, which served {count} of the streams")
    await streams
    table = Table("stream", "instance", "chunks", "longest gap", "end", "same text as without the kill")
    for number, (before, after) in enumerate(zip(undisturbed, answers, strict=True)):
        moved = f"{names[after.worker_id]}, killed" if after.worker_id == victim else names[after.worker_id]
        same = "yes" if after.text == before.text else "NO"
        gap = f"{after.longest_gap * 1e3:.0f} ms"
        table.add_row(str(number), moved, str(after.num_chunks), gap, after.finish_reason or "LOST", same)
    console.print(table)
    return all(
        after.finish_reason == "length" and after.text == before.text
        for before, after in zip(undisturbed, answers, strict=True)
    )


async def demonstrate(cluster: DynamoCluster) -> bool:
    names = {worker.worker_id: "ABC"[index] for index, worker in enumerate(cluster.workers)}
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(cluster.url, timeout=timeout) as session:
        is_routed = await show_routing(session, names)
        is_kept = await show_kill(session, cluster, names)
    console.print()
    console.print("no request was lost" if is_kept else "[red]a request was lost, or its answer differs[/]")
    if not is_routed:
        console.print("[red]a conversation moved away from where it was cached[/]")
    return is_kept and is_routed


def main(engine_dir: Path) -> int:
    with tempfile.TemporaryDirectory(prefix="cluster-demo-") as directory:
        cluster = DynamoCluster(sys.executable, engine_dir, Path(directory), MODEL, dict(os.environ))
        try:
            with cluster:
                console.print(f"\n[bold]Starting[/] a frontend at {cluster.url} and {NUM_INSTANCES} instances")
                cluster.start_frontend()
                for _ in range(NUM_INSTANCES):
                    cluster.start_worker("--num_threads", "1", "--kv_cache_max_tokens", "8192", "--deterministic")
                with console.status("waiting for them"):
                    cluster.wait_until_ready()
                is_right = asyncio.run(demonstrate(cluster))
        except (ClusterError, LostRequestError, aiohttp.ClientError) as error:
            console.print(f"cluster_demo: {error}", style="red", markup=False)
            return 1
        except KeyboardInterrupt:
            return 130
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
