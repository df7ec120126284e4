"""Text in, token ids out, and back. See README.md."""

from executor.text.chat_template import ChatTemplate, ChatTemplateError, MissingChatTemplateError
from executor.text.incremental_decoder import IncrementalDecoder
from executor.text.stop_strings import StopStrings
from executor.text.text_stream import TextDelta, TextStream
from executor.text.tokenizer import Tokenizer, TokenizerError

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "IncrementalDecoder",
    "MissingChatTemplateError",
    "StopStrings",
    "TextDelta",
    "TextStream",
    "Tokenizer",
    "TokenizerError",
]
