"""What Hugging Face transformers says, in float32: weights read by its own GGUF reader, tokens by a plain argmax."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


class Difference(NamedTuple):
    """Where a generated text leaves the oracle's greedy one for the first time."""

    index: int
    """Of the generated token."""
    token_id: int
    oracle_token_id: int
    margin: float
    """The oracle's best logit there less its second best."""


class Oracle:
    """transformers' Llama with the weights of a GGUF file."""

    def __init__(self, gguf_path: Path) -> None:
        config = LlamaConfig.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
        self._model = LlamaForCausalLM(config).eval()
        loaded = load_gguf_checkpoint(
            str(gguf_path), return_tensors=True, model_to_load=self._model, torch_dtype=torch.float32
        )
        weights = loaded["tensors"]
        if config.tie_word_embeddings:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        self._model.load_state_dict(weights)

    def first_difference(self, prompt: Sequence[int], generated: Sequence[int]) -> Difference | None:
        """Compare with the oracle's own greedy continuation of the prompt.

        One forward pass over prompt and `generated` gives the oracle's argmax behind every token. Up to the first
        position where it is another token than the generated one, both have the same tokens before it, so that is where
        an argmax loop of the oracle would leave `generated`, too.
        """
        with torch.inference_mode():
            token_ids = torch.tensor([[*prompt, *generated[:-1]]])
            best = self._model(token_ids, logits_to_keep=len(generated)).logits[0].topk(2)
        for index, token_id in enumerate(generated):
            oracle_token_id = int(best.indices[index, 0])
            if token_id != oracle_token_id:
                margin = float(best.values[index, 0] - best.values[index, 1])
                return Difference(index, token_id, oracle_token_id, margin)
        return None

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The explicit loop: one forward pass for each token, its argmax fed back."""
        cache = DynamicCache()
        tokens: list[int] = []
        pending = list(prompt)
        with torch.inference_mode():
            while len(tokens) < num_tokens:
                logits = self._model(torch.tensor([pending]), cache=cache).logits[0, -1]
                pending = [int(logits.argmax())]
                tokens += pending
        return tokens
