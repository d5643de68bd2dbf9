"""What a word embedding may become where bytes are limited: fewer bits, or low rank in few bits.

Its candidates are those of one site, beside the layers. What each loses is not predicted: the dense
model is run with it, on samples held out, and the change of the output is brought to the unit of
the layers' losses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tcompress.blockwise.output_sampler import OutputSampler
from tcompress.blockwise.streams import Branch, PartialModel, common_block
from tcompress.data.calibration import CalibrationData
from tcompress.errors import PlanError
from tcompress.fitting.embeddings import count_words, fit_table, read_table
from tcompress.hf.build import set_module
from tcompress.linalg.rounding import Rounding, pack, unpack
from tcompress.models import SourceModel, read_finite
from tcompress.options import Convert, Embeddings
from tcompress.planning.costs import disk_bytes
from tcompress.planning.entries import LayerPlan, Plan, Storage
from tcompress.planning.sites import plan_embeddings, roles_of, tied_to
from tcompress.planning.storage import TABLE_RANKS
from tcompress.search.candidates import BYTES, Candidate, Site
from tcompress.search.resources import RESOURCES
from tcompress.structures import structure
from tcompress.structures.lowrank import LowRankSpec

TABLE = "word embedding"
"""Name of the site in a budget."""

BITS = (8, 4)


@dataclass(frozen=True)
class TableForm:
    """One way to store the word embeddings of a model."""

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
class TableCandidate(Candidate):
    """A form of the word embeddings; it costs bytes beyond those of the smallest."""

    table: TableForm = TableForm()

    def within(self, plan: Plan) -> Plan:
        """Give a plan with tables like this."""
        return self.table.within(plan)


@dataclass(frozen=True)
class TableSite:
    """The candidates of the word embeddings."""

    site: Site

    def cost_in(self, plan: Plan) -> int:
        """Bytes of the candidate that a plan has, beyond those of the smallest."""
        rounding = None if plan.storage is None else plan.storage.embeddings
        form = TableForm(rounding, plan.embeddings)
        candidates = (c for c in self.site.candidates if isinstance(c, TableCandidate))
        return next(item.costs[BYTES] for item in candidates if item.table == form)


def table_forms(source: SourceModel, recipe: Convert) -> list[TableForm]:
    """List what the tables may become, the dense ones first."""
    group = recipe.group_size
    widths = [bits for bits in BITS if recipe.bits is None or bits <= recipe.bits]
    roundings = [Rounding.usual(bits, group) for bits in widths]
    forms = [TableForm(rounding) for rounding in (None, *roundings)]
    for fraction in TABLE_RANKS:
        options = Embeddings(method=LowRankSpec(), target=fraction)
        with suppress(PlanError):  # what computes more than a table does keeps its weight
            planned = plan_embeddings(options, source, roles_of(source))
            forms.append(TableForm(Rounding.usual(4, group), planned))
    return forms


def table_site(
    source: SourceModel,
    recipe: Convert,
    plan: Plan,
    data: CalibrationData,
    sampler: OutputSampler,
    judged: Sequence[Mapping[str, Tensor]],
    unit: float,
    device: torch.device,
    advance: Callable[[str], None],
) -> TableSite:
    """Measure what every candidate takes and loses; a change of `unit` is a loss of one."""
    forms = table_forms(source, recipe)
    sizes = [disk_bytes(source, form.within(plan), recipe.dtype) for form in forms]
    walk = _TableWalk(source, sampler, judged, device)
    candidates = []
    for form, size in zip(forms, sizes, strict=True):
        plain = form == TableForm()
        change = 0.0 if plain else walk.change(dict(_tables(source, form, data, device)))
        costs = {**dict.fromkeys(RESOURCES, 0), BYTES: size - min(sizes)}
        candidates.append(TableCandidate("", (), max(0.0, change) / unit, costs, form))
        advance("as it is" if plain else f"{form.rounding}")
    dense = candidates[0].costs
    return TableSite(Site((TABLE,), "", dense, tuple(candidates), may_stay=False))


def _tables(
    source: SourceModel, item: TableForm, data: CalibrationData, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Compute the tables of a candidate as they are read again, by module path."""
    entries = {source.keymap.runtime_name(e.name) or e.name: e for e in item.embeddings}
    for path in _paths(source):
        if path not in entries:
            name = f"{path}.weight"
            table = read_finite(source.store, source.keymap, name, device).float()
            yield path, _rounded(table, item.rounding)
            continue
        entry, layout = entries[path], entries[path].parts[0].terms[0]
        weight = read_table(source, entry, device)
        counts = count_words(data, len(weight), held_out=False).to(device)
        fitted = fit_table(entry, weight, counts, counts.new_zeros(len(counts)), torch.float32)
        tensors = {
            name.removeprefix("tc_"): _rounded(tensor, item.rounding)
            for name, tensor in fitted.tensors.items()
        }
        yield path, structure(layout.structure).dense(tensors, layout)


def _paths(source: SourceModel) -> list[str]:
    ties = getattr(source.keymap.model, "all_tied_weights_keys", {})
    return [path for path in roles_of(source).embeddings if f"{path}.weight" not in ties]


def _rounded(tensor: Tensor, rounding: Rounding | None) -> Tensor:
    return tensor if rounding is None else unpack(pack(tensor, rounding))


class _TableWalk:
    """Runs the dense model beside one with other tables, and compares what both put out."""

    def __init__(
        self,
        source: SourceModel,
        sampler: OutputSampler,
        batches: Sequence[Mapping[str, Tensor]],
        device: torch.device,
    ) -> None:
        blocks = [block.name for block in roles_of(source).blocks]
        self._model = PartialModel(source, blocks, device, head=True)
        self._sampler, self._batches = sampler, batches
        self._copies: dict[str, list[nn.Module]] = {}
        for path in _paths(source):
            for name in (path, *tied_to(source, path)):
                module = self._model.model.get_submodule(name)
                copied = copy.deepcopy(module)
                self._copies.setdefault(path, []).append(copied)
                set_module(self._model.model, name, Branch(module, copied))

    def change(self, tables: Mapping[str, Tensor]) -> float:
        """Change of the output per sample with these tables, by module path."""
        for path, table in tables.items():
            for module in self._copies[path]:
                module.weight = nn.Parameter(table, requires_grad=False)
        stream, run = self._model.stream, self._model.answer_of
        dense = [stream(batch, keep=True) for batch in self._batches]
        changed = [stream(batch, rewritten=True, keep=True) for batch in self._batches]
        total = 0.0
        with self._model.paused([*dense, *changed]):
            while name := common_block([*dense, *changed]):
                with self._model.loaded(name):
                    for one, two in zip(dense, changed, strict=True):
                        one.answer(run(one))
                        two.answer(run(two))
                        if one.output is not None:
                            total += self._sampler.change(one.output, two.output, one.batch)
                            one.output = two.output = None  # at once: logits are large
        return total / sum(len(next(iter(batch.values()))) for batch in self._batches)
