"""JSON schemas made at random, and a model that writes at random what a grammar allows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from executor.sampling import SampledRows, Sampler, SamplingSpec
from executor.text import Tokenizer

_NAMES = ["id", "name", "größe", "tags", "a b", 'say "hi"', "x", "y", "items", "value"]
_PATTERNS = ["^[a-z]{1,6}$", "^(red|green|blue)$", "^[A-Z][a-z]*-[0-9]{2}$", "[0-9]+", "^\\d{4}-\\d{2}$"]
_FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email", "hostname", "uri", "duration"]


def random_schema(generator: random.Random, depth: int) -> dict[str, Any]:
    """A schema that something satisfies, nested at most `depth` deep."""
    maker = _SchemaMaker(generator)
    schema = maker.schema(depth)
    return schema | ({"$defs": maker.definitions} if maker.definitions else {})


class _SchemaMaker:
    def __init__(self, generator: random.Random) -> None:
        self.random = generator
        self.definitions: dict[str, Any] = {}

    def schema(self, depth: int) -> dict[str, Any]:
        kinds = [self.string, self.integer, self.number, self.choice, self.plain]
        if depth > 0:
            kinds += [self.object, self.object, self.array, self.any_of, self.all_of, self.one_of]
        return self.random.choice(kinds)(depth)

    def plain(self, _depth: int) -> dict[str, Any]:
        types = ["boolean", "null", "string", "integer", ["string", "null"], ["integer", "boolean"]]
        return {"type": self.random.choice(types)}

    def string(self, _depth: int) -> dict[str, Any]:
        kind = self.random.randrange(3)
        if kind == 0:
            return {"type": "string", "pattern": self.random.choice(_PATTERNS)}
        if kind == 1:
            return {"type": "string", "format": self.random.choice(_FORMATS)}
        low = self.random.randrange(5)
        return {"type": "string", "minLength": low, "maxLength": low + self.random.randrange(8)}

    def integer(self, _depth: int) -> dict[str, Any]:
        if self.random.random() < 0.2:
            return {"type": "integer", "multipleOf": self.random.choice([2, 5, 7])}
        low = self.random.randint(-1000, 1000)
        schema: dict[str, Any] = {"type": "integer", self.random.choice(["minimum", "exclusiveMinimum"]): low}
        if self.random.random() < 0.6:
            schema[self.random.choice(["maximum", "exclusiveMaximum"])] = low + self.random.randint(2, 500)
        return schema

    def number(self, _depth: int) -> dict[str, Any]:
        low = self.random.choice([-2.5, 0, 0.25, 10])
        return {"type": "number", "minimum": low, "maximum": low + self.random.choice([0.5, 3, 1000])}

    def choice(self, _depth: int) -> dict[str, Any]:
        values: list[Any] = ["red", "größe", 'a"b', 7, -1.5, True, None, [1, 2], {"k": "v"}]
        if self.random.random() < 0.3:
            return {"const": self.random.choice(values)}
        return {"enum": self.random.sample(values, self.random.randint(1, 4))}

    def object(self, depth: int) -> dict[str, Any]:
        names = self.random.sample(_NAMES, self.random.randint(0, 5))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self.schema(depth - 1) for name in names},
            "required": [name for name in names if self.random.random() < 0.6],
        }
        other = self.random.random()
        if other < 0.6:
            schema["additionalProperties"] = False
        elif other < 0.8:
            schema["additionalProperties"] = self.schema(0)
        elif other < 0.9:
            schema["patternProperties"] = {"^p_[a-z]+$": self.schema(0)}
            schema["additionalProperties"] = False
        return schema

    def array(self, depth: int) -> dict[str, Any]:
        if self.random.random() < 0.3:
            first = [self.schema(depth - 1) for _ in range(self.random.randint(1, 3))]
            return {"type": "array", "prefixItems": first, "items": self.random.choice([False, self.schema(0)])}
        low = self.random.randrange(3)
        items = self.schema(depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + self.random.randrange(4)}

    def any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.schema(depth - 1) for _ in range(self.random.randint(1, 3))]}

    def one_of(self, depth: int) -> dict[str, Any]:
        return {"oneOf": [self.object(depth - 1), self.string(0), {"type": "boolean"}]}

    def all_of(self, depth: int) -> dict[str, Any]:
        first, second = self.random.sample(_NAMES, 2)
        name = f"part{len(self.definitions)}"
        self.definitions[name] = {}  # taken, whatever definitions it needs itself
        self.definitions[name] = self.schema(depth - 1)
        return {
            "allOf": [
                {"type": "object", "properties": {first: {"$ref": f"#/$defs/{name}"}}, "required": [first]},
                {"properties": {second: self.schema(0)}, "required": [second]},
            ],
        }


class RandomWriter:
    """Drives a sampler with random logits. Tokens that end something are preferred, so that outputs end."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = np.random.default_rng(seed)
        self._preference = np.zeros(vocab_size, np.float32)
        for token_id in range(tokenizer.vocab_size):
            text = tokenizer.token_bytes(token_id)
            if text[:1] in (b'"', b"}", b"]", b"<", b","):
                self._preference[token_id] = 3
            elif not text.strip() and text:
                self._preference[token_id] = -5
        self._preference[tokenizer.eos_token_ids] = 5

    def logits(self, rows: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        noise = self._random.standard_normal((rows, len(self._preference))) * 2
        return (noise + self._preference).astype(np.float32)

    def write(
        self, specs: Sequence[SamplingSpec], end_ids: set[int], *, max_drafts: int = 0, max_tokens: int = 2000
    ) -> list[list[int]]:
        """Sample all sequences together until each has drawn an end token; returns their tokens with it."""
        sampler = Sampler(len(self._preference))
        outputs: list[list[int]] = [[] for _ in specs]
        for request_id, spec in enumerate(specs):
            sampler.open(request_id, spec)
        live = list(range(len(specs)))
        while live:
            rows: list[SampledRows] = []
            num_rows = 0
            for request_id in live:
                count = int(self._random.integers(0, max_drafts + 1)) if max_drafts else 0
                drafts = self._random.integers(0, len(self._preference), count).tolist()
                rows.append(SampledRows(request_id, list(outputs[request_id]), drafts, num_rows, 1 + count))
                num_rows += 1 + count
            for where, result in zip(rows, sampler.sample(self.logits(num_rows), rows), strict=True):
                output = outputs[where.request_id]
                assert result.error is None, (result.error, self._tokenizer.decode(output))
                for token_id in result.token_ids:
                    output.append(token_id)
                    if token_id in end_ids:
                        live.remove(where.request_id)
                        break
                assert len(output) < max_tokens, self._tokenizer.decode(output[:200])
        return outputs
