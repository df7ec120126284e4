"""The demo model's GGUF file, as transformers reads it and as we do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as GgmlType
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.integrations.gguf.dequant import dequantize
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine_build.checkpoint import Checkpoint, ModelConfig, open_checkpoint
from engine_build.checkpoint.gguf_file import GgufFile
from tests.engine_build.written_checkpoints import gguf_name, permuted

pytestmark = pytest.mark.model

_TEXTS = [
    "Hello, world! It's a test; we'll see what they've done.",
    "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n: int) -> int:\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "emoji 🤗🚀, family 👨‍👩‍👧‍👦, flag 🇩🇪, skin 👍🏽",
    "Grüße aus Köln, naïve café, Ελληνικά, русский текст, 中文字符, 日本語, العربية, עברית",
    "1234567890 3.14159 1,000,000 0x7fff",
    "   leading, trailing   \n\n\n and\ttabs \r\n",
    "<|endoftext|><repo_name>x<file_sep>y<|not_special|>",
    "",
    " ",
]


@pytest.fixture(scope="module")
def checkpoint(demo_model_path: Path) -> Checkpoint:
    return open_checkpoint(demo_model_path)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return Tokenizer.from_str(checkpoint.tokenizer_files().files["tokenizer.json"].decode())


@pytest.fixture(scope="module")
def oracle(demo_model_path: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_model_path.parent, gguf_file=demo_model_path.name)


@pytest.fixture(scope="module")
def oracle_config(demo_model_path: Path) -> PretrainedConfig:
    return AutoConfig.from_pretrained(demo_model_path.parent, gguf_file=demo_model_path.name)


def test_weights_of_the_first_and_last_layer_are_what_transformers_decoder_makes_of_their_bytes(
    checkpoint: Checkpoint, demo_model_path: Path
) -> None:
    file = GgufFile(demo_model_path)
    outer_layers = (0, checkpoint.config.num_hidden_layers - 1)
    names = [name for layer in outer_layers for name in checkpoint.names() if f".layers.{layer}." in name]
    for name in ("model.embed_tokens.weight", "model.norm.weight", *names):
        stored_name = gguf_name(name)
        info = file.tensors[stored_name]
        rows = torch.from_numpy(np.array(file.rows(stored_name)))
        expected = rows.view(torch.float32) if info.type is GgmlType.F32 else dequantize(rows, int(info.type))
        found = permuted(checkpoint.config, name, checkpoint.tensor(name).to_float32())
        np.testing.assert_array_equal(found, expected.reshape(info.shape).numpy(), err_msg=name)


@pytest.mark.long
def test_every_weight_equals_that_of_the_model_transformers_loads(
    checkpoint: Checkpoint, demo_model_path: Path, oracle_config: PretrainedConfig
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(oracle_config)
    expected = load_gguf_checkpoint(str(demo_model_path), return_tensors=True, model_to_load=model)["tensors"]
    names = list(checkpoint.names())
    assert set(names) == set(expected)
    for name in names:
        np.testing.assert_array_equal(checkpoint.tensor(name).to_float32(), expected[name].numpy(), err_msg=name)


def test_the_configuration_is_that_of_the_published_model(checkpoint: Checkpoint) -> None:
    assert checkpoint.config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_size=64,
        norm_epsilon=float(np.float32(1e-5)),
        rope_theta=100_000.0,
        rope_scaling=None,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
        pad_token_id=2,
    )


@pytest.mark.long
def test_the_configuration_equals_transformers(checkpoint: Checkpoint, oracle_config: PretrainedConfig) -> None:
    ours, theirs = checkpoint.config, oracle_config
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.head_size == theirs.head_dim
    assert ours.norm_epsilon == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.tie_word_embeddings


@pytest.mark.parametrize("text", _TEXTS)
def test_token_ids_equal_transformers(tokenizer: Tokenizer, oracle: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert ids == oracle.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def oracle_with_digits(oracle: PreTrainedTokenizerBase) -> Tokenizer:
    """transformers' reader does not know `smollm` and cuts as GPT-2 does, which differs for spaces before a digit.

    The model's own tokenizer.json splits off each digit first, so this oracle is told to as well.
    """
    tokenizer = Tokenizer.from_str(oracle.backend_tokenizer.to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


@settings(deadline=None, max_examples=200)
@given(text=st.text(st.characters(codec="utf-8"), max_size=40) | st.text(st.sampled_from("ab 1½\n'!é<|>"), max_size=40))
def test_any_text_is_cut_as_the_model_was_trained(
    tokenizer: Tokenizer, oracle_with_digits: Tokenizer, text: str
) -> None:
    assert tokenizer.encode(text).ids == oracle_with_digits.encode(text).ids


def test_the_chat_template_is_the_files_own(checkpoint: Checkpoint, oracle: PreTrainedTokenizerBase) -> None:
    assert checkpoint.tokenizer_files().files["chat_template.jinja"].decode() == oracle.chat_template
