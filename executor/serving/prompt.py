"""From what a client sends as a prompt to token ids."""

from __future__ import annotations

from executor.api.errors import InvalidRequestError, UnsupportedFeatureError
from executor.serving.generation_request import ChatPrompt, Prompt, TextPrompt, check_unicode
from executor.text import ChatTemplateError, MissingChatTemplateError, Tokenizer


def num_characters(prompt: Prompt) -> int:
    """How much there is to tokenize; 0 for token ids."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    if isinstance(prompt, ChatPrompt):
        return sum(len(turn.content) for turn in prompt.messages)
    return 0


def prompt_token_ids(tokenizer: Tokenizer | None, prompt: Prompt, max_input_len: int) -> list[int]:
    """Tokenize a prompt.

    Text that is too long for `max_input_len` tokens whatever its tokens are is refused before it is tokenized. Safe to
    call from several threads at once.

    Raises:
        InvalidRequestError: the prompt is empty, too long or not valid Unicode, or the chat template refuses the
            conversation.
        UnsupportedFeatureError: text without a tokenizer, or a conversation without a chat template.
    """
    if isinstance(prompt, TextPrompt):
        field = "text"
        check_unicode(field, prompt.text)
        text_tokenizer = _needed(tokenizer, field)
        _check_length(field, prompt.text, text_tokenizer, max_input_len)
        token_ids = text_tokenizer.encode(prompt.text)
    elif isinstance(prompt, ChatPrompt):
        field = "chat"
        token_ids = _chat_token_ids(_needed(tokenizer, field), prompt, max_input_len)
    else:
        field = "input_token_ids"
        token_ids = list(prompt.token_ids)
    if not token_ids:
        raise InvalidRequestError(f"{field} is empty; a prompt has at least one token", field=field)
    return token_ids


def _chat_token_ids(tokenizer: Tokenizer, prompt: ChatPrompt, max_input_len: int) -> list[int]:
    if not prompt.messages:
        raise InvalidRequestError(
            "chat.messages is empty; a conversation has at least one message", field="chat.messages"
        )
    for index, message in enumerate(prompt.messages):
        check_unicode(f"chat.messages[{index}].content", message.content)
    try:
        text = tokenizer.render_chat([{"role": turn.role, "content": turn.content} for turn in prompt.messages])
    except MissingChatTemplateError as error:
        raise UnsupportedFeatureError(f"chat is not offered: {error}", field="chat") from None
    except ChatTemplateError as error:
        raise InvalidRequestError(f"chat.messages: {error}", field="chat.messages") from None
    _check_length("chat", text, tokenizer, max_input_len)
    return tokenizer.encode(text, add_special_tokens=False)


def _check_length(field: str, text: str, tokenizer: Tokenizer, max_input_len: int) -> None:
    num_bytes, most = len(text.encode()), max_input_len * tokenizer.max_token_bytes
    if num_bytes > most:
        raise InvalidRequestError(
            f"{field} has {num_bytes} bytes; the engine's max_input_len of {max_input_len} tokens holds at most {most}",
            field=field,
        )


def _needed(tokenizer: Tokenizer | None, field: str) -> Tokenizer:
    if tokenizer is None:
        raise UnsupportedFeatureError(
            f"{field} is not offered: the engine directory has no tokenizer; send input_token_ids", field=field
        )
    return tokenizer
