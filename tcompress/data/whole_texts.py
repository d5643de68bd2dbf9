"""All texts of the data that a user names, none left out and none cut off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tcompress.data.calibration import builtin_texts, label_among
from tcompress.data.chats import ChatWriter
from tcompress.data.inputs import inputs_of
from tcompress.data.tables import Kind, Table, all_empty, columns_of, content, opened
from tcompress.errors import listed
from tcompress.models import SourceModel
from tcompress.options.convert_options import Calibration

_ROWS = 1000  # read at a time


class WholeTexts(NamedTuple):
    """All texts of one source of data; to be read before the next source is asked for."""

    name: str  # such as `train.csv:text`
    rows: int
    chunks: Iterator[list[list[str]]]  # some rows at a time, each with its texts

    @classmethod
    def of(cls, source: SourceModel, options: Calibration, tokenizer: Any) -> Iterator[WholeTexts]:
        """List the sources that a calibration names; its columns are those that it reads.

        Chats are written by the tokenizer's template.
        """
        model, inputs = source.model_class.__name__, inputs_of(source)
        kinds: set[Kind] = {"text", "image"} if inputs.image else {"text"}
        for name in options.source:
            if name == "builtin":
                texts = builtin_texts()
                yield cls("builtin text", len(texts), iter([[[text] for text in texts]]))
                continue
            with opened(name, options.split) as table:
                has, single = table.rows.column_names, len(options.source) == 1
                named = [column for column in options.columns if column in has or single]
                columns = columns_of(table, named, kinds, {"text"}, model)["text"]
                label = label_among(options.source, name, table.label)
                if table.rows.info.builder_name != "text":
                    label += f":{','.join(columns)}"
                chunks = _chunks(table, columns, ChatWriter(tokenizer, table.label))
                yield cls(label, len(table.rows), chunks)


def _chunks(
    table: Table, columns: tuple[str, ...], writer: ChatWriter
) -> Iterator[list[list[str]]]:
    rows, empty = table.rows.select_columns([*columns]), True
    for first in range(0, len(rows), _ROWS):
        part = rows[first : first + _ROWS]
        cells = zip(*(part[column] for column in columns), strict=True)
        texts = [[content(writer(cell)) for cell in row] for row in cells]
        yield [[text for text in row if isinstance(text, str)] for row in texts]
        empty = empty and not any(map(any, texts))
    writer.close()
    if empty:
        raise all_empty(table, listed(columns))
