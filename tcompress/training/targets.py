"""Outputs of teachers for whole texts: computed before the first step, kept while a run lasts.

Teachers read texts with their own tokenizers, so that they may be of any width and family. Of
embeddings, those of several teachers stand beside each other: cosines of the joined vectors are the
mean of the teachers' cosines. Of classes it is the mean of their probabilities.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import normalize

import tcompress
from tcompress.data.encoding import TextEncoder
from tcompress.data.inputs import collate, inputs_of
from tcompress.data.labels import label_names, order_of
from tcompress.data.sentences import PLAIN, SentenceEncoder
from tcompress.errors import DataError, InputError, TrainingError
from tcompress.hf.opening import load_model
from tcompress.models import SourceModel, tell_padding
from tcompress.progress import Progress
from tcompress.training.batches import Encoded, Text
from tcompress.training.checkpoints import write_tensors
from tcompress.training.objectives import Observed

MOST_BYTES = 4 * 2**30
"""Of all that is kept; a run that needs more is refused before anything is computed."""

CHUNK = 1024
"""Texts in a file: what is computed again at most, where a run was killed."""

_AT_ONCE = 64  # texts in a forward pass
FITTED = 4096  # texts that the map into the student's space is fitted to, at most
_LEAST = 1e-9  # of the largest singular value: what is smaller is rounding
_WHAT = "what teachers say of texts"

Outputs = Literal["vectors", "classes"]
"""Embeddings of texts, or scores of classes."""


@dataclass(frozen=True)
class TextTeacher:
    """One teacher and how it reads texts; `order` has its label for each of the student's."""

    source: SourceModel
    encoder: TextEncoder
    sentences: SentenceEncoder
    kind: Outputs
    order: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls, source: SourceModel, max_length: int, kind: Outputs, labels: Sequence[str] = ()
    ) -> TextTeacher:
        """Open its tokenizer, for texts of so many tokens or of as many as the teacher takes.

        For `classes` the student's labels say in which order they are.
        """
        sentences = SentenceEncoder.of(source) if kind == "vectors" else PLAIN
        encoder = sentences.reader(source, inputs_of(source), max_length)
        order = order_of(labels, label_names(source.config)) if kind == "classes" else None
        return cls(source, encoder, sentences, kind, None if order is None else tuple(order))

    @property
    def dtype(self) -> torch.dtype:
        """Type that outputs are kept in: float16 leaves cosines four digits."""
        return torch.float16 if self.kind == "vectors" else torch.float32

    def identity(self, texts: Iterable[Text]) -> str:
        """A name that changes with the weights, the texts and how they are read."""
        reading = (self.encoder.limit, self.sentences.words, self.sentences.default, self.order)
        facts = f"{tcompress.__version__}\0{self.source.store.fingerprint()}\0{reading}\0"
        digest = hashlib.sha256(facts.encode())
        for text in texts:
            digest.update("\0".join(text).encode("utf-8", "surrogatepass") + b"\1")
        return digest.hexdigest()[:16]

    def rows(self, texts: Sequence[Text]) -> list[dict[str, Tensor]]:
        """Write texts, or pairs of them, as the teacher's inputs."""
        first = [text[0] for text in texts]
        if self.kind == "vectors":
            first = self.sentences.default.before(first)
        second = [text[1] for text in texts] if texts and len(texts[0]) > 1 else None
        rows = self.encoder.encode(first, second)
        if not all(rows):
            raise DataError(
                f"the teacher `{self.source.id}` has no token for `{first[rows.index({})][:40]}`",
                "remove such texts from the data",
            )
        return rows

    @torch.no_grad()
    def outputs(self, model: torch.nn.Module, texts: Sequence[Text]) -> Tensor:
        """Compute embeddings of length 1, or scores in the student's order.

        Returns:
            (texts, width or classes), on the CPU.
        """
        rows, device = self.rows(texts), next(model.parameters()).device
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row]["input_ids"]))
        parts: list[Tensor] = []
        for start in range(0, len(order), _AT_ONCE):
            chosen = [rows[row] for row in order[start : start + _AT_ONCE]]
            collated = collate(chosen, self.encoder.pad)
            batch = {key: item.to(device) for key, item in collated.items()}
            output = model(**batch)
            if self.kind == "vectors":
                states = output.last_hidden_state.float()
                parts.append(self.sentences(states, batch["attention_mask"]).cpu())
            else:
                parts.append(output.logits.float().cpu())
        computed = torch.cat(parts)
        if not bool(computed.isfinite().all()):
            raise TrainingError(
                f"the teacher `{self.source.id}` gives NaN or infinity for a text",
                "repair its checkpoint, or leave it out of `--teacher`",
            )
        if self.order is not None:
            computed = computed[:, [*self.order]]
        return computed[torch.tensor(order).argsort()].to(self.dtype)


@dataclass(frozen=True, eq=False)
class Targets:
    """Outputs of teachers for the texts of a run, by example. Use `Targets.of`."""

    kind: Outputs
    table: Tensor  # (texts, width or classes)
    rows: Mapping[Encoded, Tensor]  # of the table: (examples, texts of one)
    mapped: Tensor | None = None  # embeddings in the student's space: (texts, width)

    @classmethod
    def of(
        cls,
        teachers: Sequence[TextTeacher],
        data: Sequence[Encoded],
        folder: Path,
        accelerator: Accelerator,
        progress: Progress,
        *,
        independent: bool = False,
    ) -> Targets:
        """Read outputs that the folder has, and compute the others; processes share the work.

        The teachers are all for `vectors` or all for `classes`, each of which is a yes or no of its
        own if `independent`. Every process can read the folder.

        Raises:
            InputError: There are too many texts.
            TrainingError: A teacher gives NaN or infinity.
        """
        every = (text for examples in data for row in examples.texts or () for text in row)
        texts = [*dict.fromkeys(every)]
        numbers = {text: number for number, text in enumerate(texts)}
        _check_room(teachers, len(texts), data[0])
        progress.stage("teachers read the texts", len(texts) * len(teachers), "texts")
        tables = [
            torch.cat([*_outputs_of(teacher, texts, folder, accelerator, progress)])
            for teacher in teachers
        ]
        rows: dict[Encoded, Tensor] = {}
        for examples in data:
            of_texts = [[numbers[text] for text in row] for row in examples.texts or ()]
            rows[examples] = torch.tensor(of_texts)
            examples.tells_places = True
        kind = teachers[0].kind
        return cls(kind, _joined(tables, kind, independent=independent), rows)

    def observed(self, data: Encoded, indices: Tensor, device: torch.device) -> Observed:
        """Outputs for examples, as if the teachers had been run.  # indices: (examples,)."""
        rows = self.rows[data][indices.cpu()].flatten()
        outputs = self.table[rows].to(device, torch.float32)
        if self.kind == "classes":
            return Observed(SimpleNamespace(logits=outputs))
        mapped = None if self.mapped is None else self.mapped[rows].to(device)
        return Observed(vectors=outputs, mapped=mapped)

    def fit_map(self, data: Encoded, embed: Callable[[list[int]], Tensor], path: Path) -> Targets:
        """Bring the teachers' embeddings into the student's space, as near as turning allows.

        They are projected on their own principal axes, as many as the student has (PCA about the
        origin, as cosines are), and turned to where the student's embeddings of the same texts are
        (Procrustes: Schönemann, 1966, doi:10.1007/BF02289451). So cosines stay what they were, and
        nothing is to be dropped afterwards. In float64.

        `embed` makes the student's embeddings (texts, width) of training examples, by their
        numbers; the file keeps the map.
        """
        if not path.is_file():
            count = min(len(data), FITTED)
            student = embed([*range(count)]).cpu().double()
            taught = self.table[self.rows[data][:count].flatten()].double()
            map_ = _turning(self.table, taught, student).float()
            write_tensors(path, {"map": map_}, _WHAT)
        map_ = load_file(path)["map"]
        parts = (normalize(part.float() @ map_, dim=-1) for part in self.table.split(2**14))
        return replace(self, mapped=torch.cat([*parts]))


def _turning(table: Tensor, taught: Tensor, student: Tensor) -> Tensor:
    """Map of the teachers' space into the student's.  # (all, D), (n, D), (n, d) -> (D, d)."""
    moments = torch.zeros(table.shape[1], table.shape[1], dtype=torch.float64)
    for part in table.split(2**14):
        moments += part.double().mT @ part.double()
    _, axes = torch.linalg.eigh(moments)  # in ascending order
    axes = axes.flip(-1)[:, : student.shape[1]]
    u, sizes, vh = torch.linalg.svd((taught @ axes).mT @ student, full_matrices=False)
    # Where texts are fewer than axes, nothing says where the others are to be turned to.
    nonzero = sizes > _LEAST * sizes.max()
    return axes @ u[:, nonzero] @ vh[nonzero]


def _check_room(teachers: Sequence[TextTeacher], count: int, train: Encoded) -> None:
    """Refuse more texts than are kept, with about as many samples to train on as would be."""
    size = sum(_width(teacher) * teacher.dtype.itemsize for teacher in teachers)
    needed = count * size
    if needed > MOST_BYTES:
        of_samples = {text for example in train.texts or () for text in example}
        room = MOST_BYTES // size - (count - len(of_samples))
        limit = max(1, room * len(train) // max(1, len(of_samples)) * 99 // 100)
        raise InputError(
            f"what the teachers say of {count:,} texts takes {needed / 2**30:.1f} GiB, at most "
            f"{MOST_BYTES / 2**30:g} are kept",
            f"train on fewer texts: `--samples {limit:,}`".replace(",", ""),
        )


def _width(teacher: TextTeacher) -> int:
    if teacher.kind == "classes":
        return int(teacher.source.config.num_labels)
    config = teacher.source.config.get_text_config()
    return int(getattr(config, "hidden_size", 0) or 1024)


def _outputs_of(
    teacher: TextTeacher,
    texts: Sequence[Text],
    folder: Path,
    accelerator: Accelerator,
    progress: Progress,
) -> Iterator[Tensor]:
    """A teacher's outputs, chunk by chunk; which texts are in one does not depend on anything."""
    subfolder = folder / f"targets-{teacher.identity(texts)}"
    firsts = range(0, len(texts), CHUNK)
    files = {first: subfolder / f"{first:09d}.outputs" for first in firsts}
    shared = firsts[accelerator.process_index :: accelerator.num_processes]
    if all(files[first].is_file() for first in shared):
        progress.advance(len(texts))
    else:
        model = load_model(teacher.source, dtype=torch.float32, device=accelerator.device)
        tell_padding(model, teacher.encoder.pad)
        for first in shared:
            chunk = texts[first : first + CHUNK]
            if not files[first].is_file():
                write_tensors(files[first], {"outputs": teacher.outputs(model, chunk)}, _WHAT)
            progress.advance(len(chunk) * accelerator.num_processes)
        del model
    accelerator.wait_for_everyone()
    for file in files.values():
        yield load_file(file)["outputs"]


def _joined(tables: Sequence[Tensor], kind: str, *, independent: bool) -> Tensor:
    """One table of the outputs of several teachers."""
    if len(tables) == 1:
        return tables[0]
    if kind == "vectors":
        return torch.cat([table / len(tables) ** 0.5 for table in tables], -1)
    scores = torch.stack([*tables]).double()
    if scores.shape[-1] == 1:
        return scores.mean(0).float()
    if independent:
        return torch.logit(scores.sigmoid().mean(0)).float()
    return (scores.log_softmax(-1).logsumexp(0)).float()
