"""Chats in the forms that data has them, written by the template of a model's tokenizer."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from tcompress.data.chats import is_chat, messages_of
from tcompress.data.tables import kinds_of, opened
from tcompress.errors import DataError
from tcompress.evaluation.measuring import evaluate
from tcompress.options import Evaluate
from tests.support.evaluation import headed, rows_file
from tests.support.model_folders import save_tokenizer, sentences

pytestmark = pytest.mark.usefixtures("one_thread")

CHAT = [{"role": "user", "content": "hi there"}, {"role": "assistant", "content": "yes"}]
SHARED = [{"from": "Human", "value": "hi there"}, {"from": "gpt", "value": "yes"}]
SAID = [{"type": "text", "text": "hi "}, {"type": "image"}, {"type": "text", "text": "there"}]
PARTS = [{"role": "user", "content": SAID}, CHAT[1]]
TOLD = [{"speaker": "user", "text": "hi there"}, {"speaker": "bot", "text": "yes"}]
CALL = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
CALLED = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]
Form = tuple[Any, str, list[dict[str, Any]]]
FORMS: dict[str, Form] = {
    "messages": ({"messages": CHAT}, "messages", CHAT),
    "ShareGPT": ({"conversations": SHARED}, "conversations", CHAT),
    "parts": ({"messages": PARTS}, "messages", CHAT),
    "calls of tools": ({"messages": CALL}, "messages", CALLED),
    "as text": ({"messages": json.dumps(CHAT)}, "messages", CHAT),
    "speakers": ({"dialogue": TOLD}, "dialogue", CHAT),
    "turns": ({"conversation": [{"human": "hi there", "assistant": "yes"}]}, "conversation", CHAT),
    "prompt and completion": ({"prompt": CHAT[:1], "completion": CHAT[1:]}, "completion", CHAT),
    "preferences": ({"chosen": CHAT, "rejected": SHARED}, "chosen", CHAT),
    "bare": (CHAT, "messages", CHAT),
}  # fmt: skip


@pytest.mark.parametrize("lines", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_chats_in_every_form(form: str, lines: bool, tmp_path: Path) -> None:
    row, column, chat = FORMS[form]
    path = tmp_path / ("chats.jsonl" if lines else "chats.json")
    path.write_text("\n".join([json.dumps(row)] * 3) if lines else json.dumps([row] * 3))
    with opened(str(path), "train") as table:
        assert len(table.rows) == 3
        assert kinds_of(table)[column] == "chat"
        assert [messages_of(cell) for cell in table.rows[column]] == [chat] * 3


def test_prompts_with_an_empty_row(tmp_path: Path) -> None:
    rows = [{"prompt": CHAT[:1] * full, "chosen": CHAT[1:] * full} for full in (0, 1)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with opened(str(tmp_path / "chats.jsonl"), "train") as table:
        assert table.rows["chosen"][:] == [None, json.dumps(CHAT)]


def test_lists_in_older_files_of_the_library(tmp_path: Path) -> None:
    old = {"role": ["user", "assistant"], "content": ["hi there", "yes"]}
    datasets.Dataset.from_dict({"messages": [old] * 3}).save_to_disk(str(tmp_path / "old"))
    with opened(str(tmp_path / "old"), "train") as table:
        assert kinds_of(table) == {"messages": "chat"}
        assert messages_of(table.rows[0]["messages"]) == CHAT


@pytest.mark.parametrize(
    "cell",
    [None, "", [], "[x", '[{"a": 1}]', [{"a": 1}], ["hi"], {"role": "user"}, [{"role": "x"}]],
)
def test_others_are_no_chats(cell: Any) -> None:
    assert not is_chat(cell)


def test_tables_of_authors_are_no_chats(tmp_path: Path) -> None:
    rows = [{"author": f"A{index}", "text": text} for index, text in enumerate(sentences(3))]
    (tmp_path / "t.json").write_text(json.dumps({"data": rows}))
    with opened(str(tmp_path / "t.json"), "train") as table:
        assert kinds_of(table) == {"author": "text", "text": "text"}


TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no such role') }}{% endif %}"
    "{{ '<s>' if loop.first }}{{ 'w1 ' if m.role == 'user' else 'w2 ' }}{{ m.content }} "
    "{% endfor %}"
)


def test_chats_are_predicted_as_each_model_writes_them(tmp_path: Path) -> None:
    texts = sentences(12)
    chats = [
        [{"role": "user", "content": one}, {"role": "assistant", "content": two}]
        for one, two in zip(texts[::2], texts[1::2], strict=True)
    ]
    data = rows_file(tmp_path / "chats.jsonl", id=[*map(str, range(6))], messages=chats)
    folder = headed("gpt2", tmp_path / "gpt2", "GPT2LMHeadModel")
    save_tokenizer(folder, bos_token="<s>")
    wanted = {"task": "perplexity", "bootstrap": 0, "pack": "none"}
    said = Evaluate.model_validate({**wanted, "data": str(data)})
    with pytest.raises(DataError, match="holds chats, and the model's tokenizer has no chat temp"):
        evaluate([folder], said, save=False)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    plain = tmp_path / "plain.txt"
    plain.write_text("".join(f"w1 {one['content']} w2 {two['content']} \n" for one, two in chats))
    same = Evaluate.model_validate({**wanted, "data": str(plain)})
    [found], [expected] = (evaluate([folder], one, save=False) for one in (said, same))
    assert found.metrics[0].value == pytest.approx(expected.metrics[0].value)
    assert found.metrics[0].protocol["chats"] == "written by the tokenizer's template"
    assert found.metrics[0].protocol["data"].endswith("chats.jsonl:messages")
    # Other tasks say that they read no chats.
    other = Evaluate.model_validate(
        {**wanted, "task": "masked-lm", "pack": None, "data": str(data)}
    )
    with pytest.raises(DataError, match="`messages` holds chats, which this task does not read"):
        evaluate([headed("bert", tmp_path / "bert", "BertForMaskedLM")], other, save=False)
