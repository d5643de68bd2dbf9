"""Names that columns of data go by, for each role that a column can have."""

from __future__ import annotations

import re

# In the order of preference, as `plain_name` writes them; `text` and `pair` are guessed by content
# if no name fits.
COLUMN_NAMES: dict[str, tuple[str, ...]] = {
    "text": ("sentence1", "sentencea", "sent1", "senta", "premise", "question1", "texta", "text1",
             "string1", "1string", "s1", "query", "anchor", "context", "sentence", "text",
             "question", "content", "review"),
    "pair": ("sentence2", "sentenceb", "sent2", "sentb", "hypothesis", "question2", "textb",
             "text2", "string2", "2string", "s2", "document", "passage", "positive", "response",
             "answer"),
    "source": ("source", "src", "sourcetext", "input", "inputs", "inputtext", "article", "document",
               "dialogue", "context", "question", "text"),
    "target": ("target", "tgt", "targettext", "output", "outputs", "outputtext", "summary",
               "highlights", "abstract", "translation", "response", "answer", "labels", "label"),
    "semantics": (),  # a third text is named, never guessed
    "image": ("image", "img", "picture", "pixelvalues", "imagebytes", "imgbytes", "imagepath",
              "imgpath", "filename", "file", "path", "bytes", "jpg", "jpeg", "png", "webp"),
    "volume": ("volume", "voxels"),
    "shape": ("shape",),
    "label": ("label", "labels", "class", "target", "category", "finelabel", "coarselabel",
              "labeltext", "labelname", "classname", "goldlabel", "isduplicate", "quality",
              "sentiment", "emotion", "intent", "stars", "rating"),
    "score": ("score", "similarityscore", "similarity", "relatednessscore", "relatedness", "sim",
              "stsscore", "label", "labels", "target"),
}  # fmt: skip
ROLES = tuple(COLUMN_NAMES)
"""What a column can be for; `pair` and `semantics` are further texts, `target` is a text that
`source` becomes."""

# Further names that show a first line to be a header: no row begins with them.
_OTHERS = {"id", "idx", "index", "guid", "date", "genre", "split", "source"}
_USUAL = _OTHERS.union(*COLUMN_NAMES.values())


def plain_name(name: str) -> str:
    """Write a column's name without case, and without what parts words: `Sentence_A`, `#1 ID`."""
    # `text.1` is the second column that is called `text`, not one that is called `text1`.
    if re.search(r"\.\d+$", name):
        return name.casefold()
    return re.sub(r"[^a-z0-9]", "", name.casefold()) or name.casefold()


def numbered_names(count: int) -> tuple[str, ...]:
    """Names for so many columns that have none."""
    return tuple(f"column{number + 1}" for number in range(count))


def is_usual(name: str) -> bool:
    """Tell whether a cell is a name that columns go by."""
    return plain_name(name) in _USUAL
