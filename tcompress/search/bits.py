"""What a word embedding may become where bytes are limited: fewer bits, or low rank in few bits.

Its candidates are those of one site, beside the layers. What each loses is not predicted: the dense
model is run with it, on samples held out, and the change of the output is brought to the unit of
the layers' losses.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor, nn

from tcompress.blockwise.output_sampler import sampler_of
from tcompress.blockwise.streams import Branch, PartialModel
from tcompress.fitting.embeddings import count_words, fit_table
from tcompress.fitting.layer_fits import dense_matrix
from tcompress.hf.build import set_module
from tcompress.linalg.rounding import Rounding, pack, unpack
from tcompress.models import read_finite
from tcompress.planning.costs import TABLE_RANKS, disk_bytes
from tcompress.planning.entries import LayerPlan, Plan, Storage
from tcompress.planning.sites import low_rank_tables, module_path, tied_to, untied_tables
from tcompress.search.candidates import BYTES, Candidate, SearchInputs, Site
from tcompress.search.corrections import judged_batches
from tcompress.structures import structure

TABLE = "word embedding"  # name of the site in a budget
BITS = (8, 4)


@dataclass(frozen=True)
class TableCandidate(Candidate):
    """A form of the word embeddings; it costs bytes beyond those of the smallest."""

    rounding: Rounding | None = None
    embeddings: tuple[LayerPlan, ...] = ()  # where they are of low rank

    def within(self, plan: Plan) -> Plan:
        """Give a plan with tables like this."""
        weights = None if plan.storage is None else plan.storage.weights
        storage = Storage(weights=weights, embeddings=self.rounding)
        rounds = weights is not None or self.rounding is not None
        changes = {"embeddings": self.embeddings, "storage": storage if rounds else None}
        return plan.model_copy(update={**changes, "method": self._label(plan.method, weights)})

    def _label(self, label: str, weights: Rounding | None) -> str:
        """Name what is done to the tables beside what is done to the rest, as options do."""
        words = [w for w in label.split(" + ") if w != "embeddings" and not w.startswith("words")]
        if self.embeddings:
            words.insert(sum(not word.endswith("bit") for word in words), "embeddings")
        if self.rounding is not None and (weights is None or weights.bits != self.rounding.bits):
            words.append(f"words{self.rounding.bits}bit")
        return " + ".join(words)


@dataclass(frozen=True)
class TableSite(Site):
    """The candidates of the word embeddings."""

    candidates: tuple[TableCandidate, ...]
    smallest: int = 0  # bytes of the planned model with the smallest of them


def table_site(inputs: SearchInputs, unit: float) -> TableSite:
    """Measure what every candidate takes and loses; a change of `unit` is a loss of one."""
    source, recipe = inputs.source, inputs.recipe
    dense, group = TableCandidate("", (), 0.0, {}), recipe.group_size
    widths = [bits for bits in BITS if recipe.bits is None or bits <= recipe.bits]
    rounded = (replace(dense, rounding=Rounding.usual(bits, group)) for bits in widths)
    tables = filter(None, (low_rank_tables(source, fraction) for fraction in TABLE_RANKS))
    four = replace(dense, rounding=Rounding.usual(4, group))
    forms = [dense, *rounded, *(replace(four, embeddings=entries) for entries in tables)]
    inputs.progress.stage("trying word embeddings", len(forms), "tables")
    sizes = [disk_bytes(source, form.within(inputs.plan), recipe.dtype) for form in forms]
    changes = chain([0.0], _changes(inputs, forms[1:]))
    candidates: list[TableCandidate] = []
    for form, size, change in zip(forms, sizes, changes, strict=True):
        costs = Counter({BYTES: size - min(sizes)})  # and nothing of other resources
        candidates.append(replace(form, loss=max(0.0, change) / unit, costs=costs))
        inputs.progress.advance(1, f"{form.rounding or 'as it is'}")
    site = TableSite((TABLE,), "", candidates[0].costs, tuple(candidates), may_stay=False)
    return replace(site, smallest=min(sizes))


def _tables(inputs: SearchInputs, form: TableCandidate) -> Iterator[tuple[str, Tensor]]:
    """Compute the tables of a candidate as they are read again, by module path."""
    source, device = inputs.source, inputs.device
    assert inputs.data is not None
    entries = {module_path(source, entry.name): entry for entry in form.embeddings}
    for path in untied_tables(source):
        if path not in entries:
            table = read_finite(source.store, source.keymap, f"{path}.weight", device)
            yield path, _rounded(table.float(), form.rounding)
            continue
        entry, layout = entries[path], entries[path].parts[0].terms[0]
        weight = dense_matrix(source, entry, device)
        counts = count_words(inputs.data, len(weight), held_out=False).to(device)
        fitted = fit_table(entry, weight, counts, counts.new_zeros(len(counts)), torch.float32)
        tensors = {
            name.removeprefix("tc_"): _rounded(tensor, form.rounding)
            for name, tensor in fitted.tensors.items()
        }
        yield path, structure(layout.structure).dense(tensors, layout)


def _rounded(tensor: Tensor, rounding: Rounding | None) -> Tensor:
    return tensor if rounding is None else unpack(pack(tensor, rounding))


def _changes(inputs: SearchInputs, forms: Sequence[TableCandidate]) -> Iterator[float]:
    """Measure the change of the output per sample with each form of the tables.

    The dense model runs beside one with these tables.
    """
    source = inputs.source
    assert inputs.data is not None
    sampler = sampler_of(source)
    batches = judged_batches(inputs.data, sampler, source, 2)
    partial = PartialModel(source, inputs.device, head=True)
    copies: dict[str, list[nn.Module]] = {}
    for path in untied_tables(source):
        for name in (path, *tied_to(source, path)):
            module = partial.model.get_submodule(name)
            copies.setdefault(path, []).append(copy.deepcopy(module))
            set_module(partial.model, name, Branch(module, copies[path][-1]))
    for form in forms:
        for path, table in _tables(inputs, form):
            for module in copies[path]:
                module.weight = nn.Parameter(table, requires_grad=False)
        dense = [partial.stream(batch, keep=True) for batch in batches]
        changed = [partial.stream(batch, rewritten=True, keep=True) for batch in batches]
        streams, total = [*dense, *changed], 0.0
        for _ in partial.walk(streams):
            for exact, new in zip(dense, changed, strict=True):
                exact.answer(partial.answer_of(exact))
                new.answer(partial.answer_of(new))
                if exact.output is not None:
                    total += sampler.change(exact.output, new.output, exact.batch)
                    exact.output = new.output = None  # at once: logits are large
        yield total / sum(map(sampler.samples_in, batches))
