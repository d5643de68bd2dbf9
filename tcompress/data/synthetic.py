"""Pictures, volumes, series and sounds that are drawn: calibration data that needs no files.

Pictures are dead leaves: textured shapes of all sizes that cover one another. They have what
matters for the statistics of activations, edges and a 1/f spectrum, see Lee, Mumford, Huang,
"Occlusion Models for Natural Images" (2001), and Baradad et al., "Learning to See by Looking at
Noise" (2021), where networks learn useful features from them. Sounds are spectrograms with the
outline of speech. Neither takes the place of real data.

A task ships too: random words that are to be written again, for models with a decoder. A model can
only do it by looking at its source: no word says which one is next.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from tcompress.errors import DataError, listed

_SYLLABLE = 30  # frames, of 10 ms each
_FORMANTS = ((0.15, 0.06), (0.4, 0.07), (0.6, 0.08))  # centre and width as shares of the bands

Floats = NDArray[np.float64]

COPY = "builtin:copy"
"""Name of the data, with columns `source` and `target`."""

WORDS = (
    "alfa", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliett",
    "kilo", "lima", "mike", "november", "oscar", "papa", "quebec", "romeo", "sierra", "tango",
    "uniform", "victor", "whiskey", "xray", "yankee", "zulu",
)  # fmt: skip
"""The words that texts are made of."""

LENGTHS = (4, 6)
"""Fewest and most words of a text."""

_ROWS = {"test": 1000, "validation": 1000, "train": 40_000}


def picture(height: int, width: int, channels: int, rng: Generator) -> NDArray[np.uint8]:
    """Draw a picture of shape (height, width, channels)."""
    noise = _noise((4, height, width), rng.uniform(0.7, 1.4), rng)
    texture = np.moveaxis(0.8 * noise[:1] + 0.3 * noise[1:], 0, -1)  # colours vary together
    rows, columns = np.meshgrid(np.linspace(0, 1, height), np.linspace(0, 1, width), indexing="ij")
    angle = rng.uniform(0, 2 * np.pi)
    ramp = (np.cos(angle) * rows + np.sin(angle) * columns)[..., None]
    canvas = _colour(rng) + ramp * rng.normal(0, 0.3, 3) + rng.uniform(0, 0.3) * texture
    for _ in range(rng.integers(2, 24)):
        mask, along = _leaf(rows, columns, rng)
        leaf = _colour(rng) + rng.uniform(0, 0.15) * np.roll(texture, rng.integers(height), 0)
        if rng.random() < 0.3:
            leaf = leaf + 0.2 * np.sin(along * rng.uniform(3, 40))[..., None]
        canvas = np.where(mask[..., None], leaf, canvas)
    canvas = canvas * rng.uniform(0.6, 1.1) + rng.normal(0, 0.01, canvas.shape)
    if channels == 1:
        canvas = canvas.mean(axis=-1, keepdims=True)
    return np.asarray((np.clip(canvas, 0, 1) * 255).round(), dtype=np.uint8)


def volume(shape: tuple[int, ...], rng: Generator) -> NDArray[np.float32]:
    """Draw a volume of shape (channels, *sizes) from 0 to 1: a body, or its smooth inside."""
    noise = _noise((1, *shape[1:]), rng.uniform(1.0, 2.0), rng)
    body = (noise > rng.normal(0, 0.7)) * 1.0
    density = np.clip(0.5 + 0.25 * noise, 0, 1)
    drawn = body if rng.random() < 0.5 else body * density
    return np.broadcast_to(drawn, shape).astype(np.float32)


def series(steps: int, variables: int, rng: Generator) -> NDArray[np.float32]:
    """Draw series (steps, variables): cycles and slow noise, mixed between variables."""
    slow = _noise((variables, steps), rng.uniform(0.5, 1.5), rng).T
    phase = np.arange(steps)[:, None] / rng.uniform(8, 200) + rng.random(variables)
    drawn = slow + rng.uniform(0, 1.5) * np.sin(2 * np.pi * phase)
    mixing = np.eye(variables) + rng.normal(0, 0.5 / np.sqrt(variables), (variables, variables))
    return np.asarray(drawn @ mixing + rng.normal(0, 1, variables), dtype=np.float32)


def speech(bands: int, frames: int, rng: Generator) -> NDArray[np.float32]:
    """Draw a log-mel spectrogram of shape (bands, frames), scaled as Whisper's extractor does."""
    band = np.linspace(0, 1, bands)[:, None]
    tracks = _noise((6, frames), 2.0, rng, flat=frames / _SYLLABLE)
    voiced = 1 / (1 + np.exp(-4 * tracks[0]))
    power = np.zeros((bands, frames))
    for track, (centre, width) in zip(tracks[1:4], _FORMANTS, strict=True):
        formant = centre + 0.06 * track
        power += voiced * np.exp(-(((band - formant) / width) ** 2)) * 10 ** (-2 * centre)
    hiss = np.exp(-(((band - 0.85) / 0.2) ** 2)) / (1 + np.exp(4 * tracks[0]))
    power = (power + 0.05 * hiss) * 10 ** (0.6 * tracks[4])  # loudness of syllables
    power += 10 ** (-4.0 - band + 0.2 * tracks[5])  # room
    power *= rng.chisquare(2, power.shape) / 2  # spread of a periodogram
    log = np.log10(power + 1e-10)
    log[:, int(frames * rng.uniform(0.3, 1.0)) :] = -10.0  # silence up to the full length
    log = np.maximum(log, log.max() - 8.0)
    return np.asarray((log + 4.0) / 4.0, dtype=np.float32)


def _noise(shape: tuple[int, ...], slope: float, rng: Generator, flat: float = 0) -> Floats:
    """Draw noise, mean 0, spread 1, spectrum 1/f**slope on all axes but the first; `flat` below."""
    axes = tuple(range(1, len(shape)))
    grids = np.meshgrid(*(np.fft.fftfreq(n) * n for n in shape[1:]), indexing="ij")
    distance = np.maximum(np.sqrt(sum(grid**2 for grid in grids)), flat)
    distance.flat[0] = np.inf
    spectrum = np.fft.fftn(rng.normal(size=shape), axes=axes) / distance**slope
    noise = np.fft.ifftn(spectrum, axes=axes).real
    return np.asarray(noise / (noise.std(axis=axes, keepdims=True) + 1e-12))


def _colour(rng: Generator) -> Floats:
    return np.asarray(np.clip(rng.uniform(0.05, 0.95) + rng.normal(0, 0.15, 3), 0, 1))


def _leaf(rows: Floats, columns: Floats, rng: Generator) -> tuple[NDArray[np.bool_], Floats]:
    """Give the inside of a random ellipse, rectangle or diamond, and a coordinate along it."""
    radius = min(0.5, 0.05 / np.sqrt(rng.uniform(0.005, 1)))  # small ones are common
    angle, stretch = rng.uniform(0, np.pi), rng.uniform(0.4, 1.0)
    y, x = rows - rng.random(), columns - rng.random()
    along = (np.cos(angle) * x + np.sin(angle) * y) / radius
    across = (np.cos(angle) * y - np.sin(angle) * x) / (radius * stretch)
    power = rng.choice([1.0, 2.0, 8.0])
    return np.abs(along) ** power + np.abs(across) ** power < 1, along


def copy_rows(split: str) -> Any:
    """Make the rows of a split; no text is in two of them.

    Raises:
        DataError: There is no such split.
    """
    import datasets

    if split not in _ROWS:
        text = f"`{COPY}` has no split `{split}`; it has {listed(_ROWS)}"
        raise DataError(text, "name one of its splits")
    rng, (fewest, most) = np.random.default_rng(0), LENGTHS
    count = 2 * sum(_ROWS.values())
    lengths = rng.integers(fewest, most + 1, count)
    drawn = rng.integers(0, len(WORDS), (count, most))
    pairs = zip(drawn.tolist(), lengths.tolist(), strict=True)
    texts = iter(dict.fromkeys(" ".join(WORDS[i] for i in row[:length]) for row, length in pairs))
    chosen = {name: [*islice(texts, rows)] for name, rows in _ROWS.items()}[split]
    return datasets.Dataset.from_dict({"source": chosen, "target": chosen})
