"""Writes docs/compatibility.md: what of `tensorrt_llm.bindings.executor` is offered, from the code that decides it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import executor
from executor.api.support import Support, SupportRow, support_rows
from executor.debug_tensors import TENSOR_NAMES

PAGE = Path(__file__).parent.parent / "docs" / "compatibility.md"

_INTRODUCTION = """\
<!-- Written by scripts/compatibility_table; do not edit. -->
# Compatibility with `tensorrt_llm.bindings.executor`

Change the import line, and a script for TensorRT-LLM's Executor bindings runs on an engine directory that
`engine-build` wrote:

```python
import executor as trtllm  # was: import tensorrt_llm.bindings.executor as trtllm
```

Every class and field is there under its name, in its order and with its default. What is not offered is refused with
an `UnsupportedFeatureError` that names it and says why; nothing is ignored silently. This page is written from the
code that decides it.

## What is different
| what | here | upstream |
|---|---|---|
| a wrong request | raises a typed error in `enqueue_request` | was queued, and got an error response |
| several requests, one of them wrong | `enqueue_requests` queues none of them | not specified |
| `await_responses(id)` of a request whose final response was taken | raises `InvalidRequestError` | waited, or gave \
an error response |
| `await_responses(ids)` of such requests | one error response for each | the same, with another text |
| after `shutdown` | `await_responses` gives what is left, then raises; statistics can still be read | every call \
raised |
| `enable_chunked_context` | on by default | on in C++, off in the Python bindings |
| `free_gpu_memory_fraction` | of free main memory, where the engine runs on a CPU | of free GPU memory |
| `external_draft_tokens_config` | the request goes on after its drafts are verified | it ended there |
| `logits_post_processor`: `stream_ptr` | `None` on a CPU; `torch.cuda.ExternalStream(stream_ptr)` then gives `None` \
as well, while a post-processor runs, and `torch.cuda.stream(None)` does nothing | a CUDA stream |
| `logits_post_processor`: `logits` | a torch tensor where torch is installed, else a numpy array | a torch tensor |
| `GuidedDecodingConfig.backend` | llguidance follows every grammar, whichever is named | as named |
| KV cache events that do not fit the buffer | are counted, in a `KVCacheOverflowData` | were lost silently |
| `KVCacheStoredBlockData.block_hash` | the first 64 bits of a 256-bit digest | a 64-bit hash |
| `DebugConfig.debug_tensor_names` | the names below | any tensor of the network |
| `Executor(engine_buffer, ...)`, `Executor(encoder_model_path, ...)` | refused: engines are opened from their \
directory, and are decoder-only | offered |

Old spellings that upstream once had are understood, with a `DeprecationWarning`: `Request(max_new_tokens=...)`,
`SamplingConfig(random_seed=..., min_length=...)`. So are the attributes `ExecutorConfig.logits_post_processor_map` and
`logits_post_processor_batched`.
"""

_TABLES = """
## Fields
*supported*: does what its name says. *no effect*: may hold anything, since what it asks for is the case anyway.
*refused*: any value but the default is an error. *never set*: results hold the default. *addition*: upstream does not
have it.
"""

_DEBUG_TENSORS = """
## Debug tensors
T rows of B sequences in a step, S of them sampled.

| name | what |
|---|---|
"""


def page() -> str:
    """The whole page."""
    classes = {name: cls for name in sorted(executor.__all__) if _has_rows(cls := getattr(executor, name))}
    named_only = _named_only(classes)
    in_full = []
    tables = []
    for name, cls in classes.items():
        rows = list(support_rows(cls))
        if name in named_only:
            continue
        if all(row.support is Support.SUPPORTED and not row.reason for row in rows):
            in_full.append(name)
        else:
            tables.append(_table(name, rows))
    return "".join(
        [
            _INTRODUCTION,
            _TABLES,
            f"\nSupported in full: {_names(in_full)}.\n",
            f"\nThere for scripts that name them, refused where they are given: {_names(sorted(named_only))}.\n",
            *tables,
            _DEBUG_TENSORS,
            *(f"| `{name}` | {what} |\n" for name, what in TENSOR_NAMES.items()),
        ]
    )


def _has_rows(cls: Any) -> bool:
    return isinstance(cls, type) and (dataclasses.is_dataclass(cls) or issubclass(cls, Enum))


def _named_only(classes: dict[str, Any]) -> set[str]:
    """Classes that appear in refused fields, and in fields of such classes, only."""
    places: dict[str, list[tuple[str, Support]]] = {name: [] for name in classes}
    for owner, cls in classes.items():
        if dataclasses.is_dataclass(cls):
            hints = get_type_hints(cls)
            for row in support_rows(cls):
                for name, other in classes.items():
                    if _mentions(hints[row.name], other):
                        places[name].append((owner, row.support))
    found: set[str] = set()
    while True:
        more = {
            name
            for name, where in places.items()
            if where and all(support in _REFUSALS or owner in found for owner, support in where)
        }
        if more == found:
            return found
        found = more


def _mentions(hint: Any, cls: Any) -> bool:
    return hint is cls or any(_mentions(part, cls) for part in get_args(hint))


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(name: str, rows: list[SupportRow]) -> str:
    lines = [f"| `{row.name}` | {row.support} | {row.reason} |\n" for row in rows]
    return f"\n### {name}\n| field | | why |\n|---|---|---|\n" + "".join(lines)


_REFUSALS = (Support.REFUSED, Support.NEVER_SET)

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
