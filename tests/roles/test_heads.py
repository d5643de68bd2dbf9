"""How attentions cut features into heads, read from their code."""

from __future__ import annotations

from typing import Any

import pytest

from tcompress.roles.heads import HeadSplit, head_split

Self = Any


class Open:
    def forward(self: Self, x: Any) -> Any:
        return x.view(
            *x.shape[:-1],
            -1,
            self.head_dim,
        )


class InATuple:
    def forward(self: Self, x: Any) -> Any:
        shape = (*x.shape[:-1], -1, self.attention_head_size)
        return x.view(shape)


class Counted:
    def forward(self: Self, x: Any) -> Any:
        return x.view(-1, self.head_dim), self.num_key_value_heads


class Closed:
    def forward(self: Self, x: Any) -> Any:
        # not view(-1, self.head_dim): the number of heads is fixed
        return x.view(x.shape[0], self.num_heads, self.head_dim)


@pytest.mark.parametrize(
    ("kind", "split"),
    [
        (Open, HeadSplit("head_dim", counts=False)),
        (InATuple, HeadSplit("attention_head_size", counts=False)),
        (Counted, HeadSplit("head_dim", counts=True)),
        (Closed, None),
    ],
)
def test_only_an_open_number_of_heads_is_found(kind: Any, split: HeadSplit | None) -> None:
    assert head_split(kind) == split
    # Without source, as in a console, nothing is known.
    namespace: dict[str, Any] = {}
    exec("def forward(self, x): return x.view(-1, self.head_dim)", namespace)
    assert head_split(type("Console", (), namespace)) is None
