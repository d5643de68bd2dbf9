"""Names that columns of data go by, for each role that a column can have."""

from __future__ import annotations

COLUMN_NAMES: dict[str, tuple[str, ...]] = {
    # In the order of preference; `text` and `pair` are guessed by content if no name fits.
    "text": ("sentence1", "premise", "question1", "text_a", "query", "anchor", "context",
             "sentence", "text", "question", "content", "review"),
    "pair": ("sentence2", "hypothesis", "question2", "text_b", "document", "passage", "positive",
             "response", "answer"),
    "image": ("image", "img", "picture", "pixel_values"),
    "volume": ("volume", "voxels"),
    "shape": ("shape",),
    "label": ("label", "labels", "class", "target", "category", "fine_label", "coarse_label",
              "label_text", "label_name", "class_name", "gold_label", "sentiment", "emotion",
              "intent", "stars", "rating"),
    "score": ("score", "similarity_score", "similarity", "relatedness_score", "relatedness",
              "label", "labels", "target"),
}  # fmt: skip
ROLES = tuple(COLUMN_NAMES)  # what a column can be for; `pair` is a second text

# Further names that show a first line to be a header: no row begins with them.
_OTHERS = {"id", "idx", "index", "guid", "date", "genre", "split", "source"}
USUAL = _OTHERS.union(*COLUMN_NAMES.values())
