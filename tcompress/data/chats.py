"""Chats as text: rows of messages, written by the chat template of a model's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tcompress.errors import DataError, first_line
from tcompress.progress import tell

# Keys of the speaker and of what is said, as most data has them, and as ShareGPT has.
_KEYS = (("role", "content"), ("from", "value"))
_SPEAKERS = {"human": "user", "gpt": "assistant", "bot": "assistant"}

Messages = Sequence[Mapping[str, Any]]


def is_chat(feature: Any) -> bool:
    """Whether a column's type is a list of messages."""
    item = getattr(feature, "feature", None)
    return isinstance(item, Mapping) and is_message(item)


def is_message(item: Mapping[str, Any]) -> bool:
    """Whether something has the keys of a message."""
    return any({*keys} <= {*item} for keys in _KEYS)


def messages_of(cell: Messages) -> list[dict[str, str]]:
    """Write messages with the keys and speakers that templates know."""
    messages = []
    for message in cell:
        speaker, said = next(keys for keys in _KEYS if keys[0] in message)
        role, content = str(message[speaker]), message.get(said)
        if isinstance(content, list):  # parts, of which some may be pictures
            parts = [part.get("text") if isinstance(part, dict) else part for part in content]
            content = "".join(part for part in parts if isinstance(part, str))
        messages.append({"role": _SPEAKERS.get(role, role), "content": content or ""})
    return messages


def as_plain_text(cell: Any) -> Any:
    """Write a chat as what is said, a message a line; other cells are left as they are."""
    if not isinstance(cell, list):
        return cell
    return "\n".join(message["content"] for message in messages_of(cell))


class ChatWriter:
    """Writes chats by a tokenizer's template; chats that it refuses are empty."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer, self._name = tokenizer, name
        self._refused = self._written = 0
        self._reason = ""

    def __call__(self, cell: Any) -> Any:
        """Write a cell if it is a chat."""
        if not isinstance(cell, list):
            return cell
        if not cell:
            return None
        if not getattr(self._tokenizer, "chat_template", None):
            raise DataError(
                f"`{self._name}` holds chats, and the model's tokenizer has no chat template",
                hint="put `chat_template.jinja` into the model's folder, or give the chats as text",
            )
        try:
            text = self._tokenizer.apply_chat_template(messages_of(cell), tokenize=False)
        except Exception as error:  # templates raise what they like, of roles that do not alternate
            self._refused += 1
            self._reason = first_line(error)
            return None
        self._written += 1
        start = self._tokenizer.bos_token
        return text.removeprefix(start) if start else text  # which the tokenizer adds again

    def close(self) -> None:
        """Tell how many chats the template refused, if there were any."""
        if not self._refused:
            return
        why = f"{self._refused:,} chats do not suit the chat template ({self._reason})"
        if not self._written:
            raise DataError(f"`{self._name}`: {why}", hint="give the chats as text")
        tell(f"{self._name}: {why}: left out")
