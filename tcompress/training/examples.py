"""Putting sets of examples together, and taking them apart."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tcompress.errors import DataError
from tcompress.options import TrainingData
from tcompress.reading.examples import Examples
from tcompress.reading.volumes import Volumes
from tcompress.source.text import listed


def joined(parts: Sequence[Examples]) -> Examples:
    """Puts several data sets one after another."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if first.windows is not None:
        raise DataError(
            f"`{first.name}` and `{parts[1].name}` are series, of which one can be trained on",
            hint="give one file with all series",
        )
    for part in parts[1:]:
        if part.classes != first.classes or len(part.texts) != len(first.texts):
            raise DataError(
                f"`{first.name}` and `{part.name}` do not go together: they have "
                f"{len(first.classes)} and {len(part.classes)} classes, and {len(first.texts)} and "
                f"{len(part.texts)} texts in an example",
                hint="give data sets with the same columns and classes",
            )
    targets: Any = None
    if first.targets is not None:
        targets = [target for part in parts for target in part.targets or ()]
    return Examples(
        name=" + ".join(part.name for part in parts),
        split=first.split,
        fingerprint=hashlib.sha256("".join(p.fingerprint for p in parts).encode()).hexdigest(),
        texts=tuple(
            [text for part in parts for text in part.texts[index]]
            for index in range(len(first.texts))
        ),
        images=tuple(image for part in parts for image in part.images),
        targets=targets,
        classes=first.classes,
        volumes=_volumes(parts),
        whole=first.whole,
    )


def with_wrong_pairs(examples: Examples, count: int, seed: int) -> Examples:
    """Adds pairs of a first text with second texts of others, as class 0.

    Args:
        examples: Pairs of texts, all right.
        count: Wrong pairs for each.
        seed: Seed of the choice.

    Raises:
        DataError: There are too few different second texts to choose among.
    """
    first, second = examples.texts
    pool = list(dict.fromkeys(second))
    if len(pool) <= count:
        raise DataError(
            f"`{examples.name}` has {len(pool)} different second texts, too few to draw {count} "
            "wrong ones",
            hint="give more pairs",
        )
    place = {text: index for index, text in enumerate(pool)}
    own = np.array([place[text] for text in second])[:, None]
    rng = np.random.default_rng(seed)
    drawn = np.stack([rng.choice(len(pool) - 1, count, replace=False) for _ in own])
    wrong = drawn + (drawn >= own)  # numbers from the right one on mean the next
    pairs = list(zip(first, second, strict=True))
    pairs += [(one, pool[i]) for one, row in zip(first, wrong.tolist(), strict=True) for i in row]
    return replace(
        examples,
        texts=([one for one, _ in pairs], [two for _, two in pairs]),
        targets=[1] * len(first) + [0] * (count * len(first)),
    )


def _volumes(parts: Sequence[Examples]) -> Volumes | None:
    found = [part.volumes for part in parts if part.volumes is not None]
    if not found:
        return None
    if len({volumes.shape[1:] for volumes in found}) > 1:
        shapes = ", ".join(
            f"`{part.name}` {volumes.shape[1:]}" for part, volumes in zip(parts, found, strict=True)
        )
        raise DataError(
            f"volumes are of different shapes: {shapes}", hint="give volumes of one shape"
        )
    return np.concatenate(found)


def with_classes(held: Examples, train: Examples) -> Examples:
    """Numbers the classes of held-out data as those of the training data."""
    unknown = [name for name in held.classes if name not in train.classes]
    if unknown:
        raise DataError(
            f"`{held.name}` has the classes {listed(unknown)}, which `{train.name}` has not",
            hint="give data sets with the same classes",
        )
    if held.classes == train.classes or held.targets is None:
        return held
    places = [train.classes.index(name) for name in held.classes]
    targets = [places[int(target)] for target in held.targets]
    return replace(held, targets=targets, classes=train.classes)


def split_off(
    examples: Examples, options: TrainingData, seed: int, fewest: int = 1
) -> tuple[Examples, Examples]:
    """Holds examples out at random.

    Args:
        examples: All examples.
        options: What share of them, and how many at most.
        seed: Seed of the choice.
        fewest: How many at least, where they are not half of all.
    """
    order = np.random.default_rng([seed, 1]).permutation(len(examples))
    least = max(1, min(fewest, len(order) // 2))
    count = min(max(round(options.holdout * len(order)), least), options.validation_samples)
    return _chosen(examples, np.sort(order[count:])), _chosen(examples, np.sort(order[:count]))


def _chosen(examples: Examples, indices: np.ndarray[Any, np.dtype[np.int64]]) -> Examples:
    places = indices.tolist()
    targets: Any = examples.targets
    return Examples(
        name=examples.name,
        split=examples.split,
        fingerprint=examples.fingerprint,
        texts=tuple([column[place] for place in places] for column in examples.texts),
        images=tuple(examples.images[place] for place in places) if examples.images else (),
        targets=None if targets is None else [targets[place] for place in places],
        classes=examples.classes,
        volumes=None if examples.volumes is None else examples.volumes[indices],
        windows=None if examples.windows is None else examples.windows.chosen(places),
        whole=examples.whole,
    )
