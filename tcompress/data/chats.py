"""Chats as text: rows of messages, written by the chat template of a model's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from tcompress.errors import DataError, counted, first_line
from tcompress.progress import tell

# Keys of who speaks, and of what is said.
_SPEAKER = ("role", "from", "speaker", "author")
_SAID = ("content", "value", "text", "message", "utterance")
# Roles as templates know them, for other words.
_ROLES = {
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "model", "ai"),
    "system": ("system",),
    "tool": ("tool", "observation", "function_response"),
}
_ROLE_OF = {word: role for role, words in _ROLES.items() for word in words}
# Columns that go on with the chat in another one.
_FIRST, _MORE = "prompt", ("completion", "chosen", "response")
_PROBED_ROWS = 20


def is_chat(cell: Any) -> bool:
    """Tell whether a cell is a chat: a list of messages, as it is or written as JSON."""
    messages = _listed(cell)
    return bool(messages) and all(isinstance(m, Mapping) and is_message(m) for m in messages)


def is_message(item: Mapping[str, Any]) -> bool:
    """Tell whether something has the keys of a message."""
    keys = {*item}
    if keys & {*_SPEAKER} and keys & {*_SAID, "tool_calls"}:
        return True
    roles = {_ROLE_OF.get(key) for key in keys}
    return {"user", "assistant"} <= roles  # a question and its answer


def _listed(cell: Any) -> list[Any]:
    """The messages of a cell, of whatever form; none if it is no chat."""
    if isinstance(cell, str):
        text, cell = cell, None
        if text.lstrip().startswith(("[{", "[ {")):
            with suppress(ValueError):
                cell = json.loads(text)
    if isinstance(cell, Mapping) and len(cell) > 1 and is_message(cell):
        # As the library gives lists of objects in its older files: an object of lists.
        columns = [value for value in cell.values() if isinstance(value, list)]
        if len(columns) < len(cell) or len({*map(len, columns)}) != 1:
            return []
        cell = [dict(zip(cell, row, strict=True)) for row in zip(*columns, strict=True)]
    return cell if isinstance(cell, list) else []


def messages_of(cell: Any) -> list[dict[str, Any]]:
    """Write messages with the keys and speakers that templates know."""
    messages: list[dict[str, Any]] = []
    for message in _listed(cell):
        speaker = next((key for key in _SPEAKER if key in message), None)
        if speaker is None:
            turns = [(key, value) for key, value in message.items() if key in _ROLE_OF and value]
            messages += [{"role": _ROLE_OF[key], "content": str(content)} for key, content in turns]
            continue
        role = str(message[speaker])
        content = next((message[key] for key in _SAID if message.get(key) is not None), None)
        if isinstance(content, list):  # parts, of which some may be pictures
            parts = [part.get("text") if isinstance(part, dict) else part for part in content]
            content = "".join(part for part in parts if isinstance(part, str))
        written = {"role": _ROLE_OF.get(role.lower(), role), "content": str(content or "")}
        calls = message.get("tool_calls")
        messages.append(written | ({"tool_calls": calls} if calls else {}))
    return messages


def as_plain_text(cell: Any) -> Any:
    """Write a chat as what is said, a message a line; other cells are left as they are."""
    if not is_chat(cell):
        return cell
    return "\n".join(message["content"] for message in messages_of(cell))


def joined_chats(rows: Any) -> Any:
    """Put the beginning of chats, where a column of its own has it, before those that go on."""
    names = rows.column_names
    rest = next((name for name in _MORE if name in names), None)
    if _FIRST not in names or rest is None or not len(rows):
        return rows
    probed = rows.select_columns([_FIRST, rest])[:_PROBED_ROWS]
    filled = [pair for pair in zip(probed[_FIRST], probed[rest], strict=True) if all(pair)]
    if not filled or not all(is_chat(cell) for pair in filled for cell in pair):
        return rows
    joined = (
        [*messages_of(first), *messages_of(others)]
        for first, others in zip(rows[_FIRST], rows[rest], strict=True)
    )
    chats = [json.dumps(chat) if chat else None for chat in joined]
    return rows.add_column("", chats).remove_columns([_FIRST, rest]).rename_column("", rest)


class ChatWriter:
    """Writes chats by a tokenizer's template; chats that it refuses are empty."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer, self._name = tokenizer, name
        self._refused = self._written = 0
        self._reason = ""
        # The token that a tokenizer begins texts with, which a template may write as well.
        start = getattr(tokenizer, "bos_token", None)
        begins = start and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        self._start = start if begins else ""

    def __call__(self, cell: Any) -> Any:
        """Write a cell if it is a chat."""
        if cell == []:
            return None
        if not is_chat(cell):
            return cell
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
        return text.removeprefix(self._start)

    def close(self) -> None:
        """Tell how many chats the template refused, if there were any."""
        if not self._refused:
            return
        chats = counted(self._refused, "chat does", "chats do")
        why = f"{chats} not suit the chat template ({self._reason})"
        if not self._written:
            raise DataError(f"`{self._name}`: {why}", hint="give the chats as text")
        tell(f"{self._name}: {why}: left out")
