"""What was written is opened and compared with what was fitted, before it is published."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tcompress.anatomy import anatomy_of
from tcompress.artifact.reader import Artifact
from tcompress.conversion.blocks import BlockResult
from tcompress.conversion.outputs import Cluster, Outputs
from tcompress.conversion.shared import Banks
from tcompress.integration.reopen import Reopened, applied, differs, refusal, unloadable
from tcompress.planning.entries import LayerPlan, Plan
from tcompress.source.text import listed
from tcompress.structures.bank import BankModule
from tcompress.structures.linear import StructuredLinear, bank_layouts

ROWS = 4  # inputs that a layer is tried on
EXACT = 1e-9  # largest difference where the very same numbers are compared, in float64


@dataclass
class Proof:
    """Compares the files with the fits of one block, and of one place of every other kind.

    Args:
        outputs: What is written.
        plan: The plan.
    """

    outputs: Outputs
    plan: Plan
    kept: dict[str, BlockResult] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layers, self.blocks = self.plan.layers, set[str]()
        for kind in dict.fromkeys(entry.kind for entry in layers):
            blocks = [entry.block for entry in layers if entry.kind == kind]
            if blocks and not any(e.kind == kind and e.block in self.blocks for e in layers):
                self.blocks.add(max(dict.fromkeys(blocks), key=blocks.count))
        if not self.blocks & {entry.block for entry in self.plan.attention}:
            self.blocks |= {entry.block for entry in self.plan.attention[:1]}
        if not self.blocks:  # a plain model that lost blocks
            source = self.outputs.source
            for block in anatomy_of(source.keymap.model).blocks[:1]:
                self.blocks.add(source.keymap.checkpoint_prefix(block.name))
        chosen = [entry for entry in layers if entry.block in self.blocks]
        self.entries = (*self.plan.embeddings[:1], *chosen)

    def keep(self, cluster: Cluster, result: BlockResult) -> None:
        """Keeps fits in memory that no file of the working folder holds, as those of a block."""
        if cluster[0] in self.entries and not result.block:
            self.kept[cluster[0].name + cluster[0].parameter] = result

    def check(
        self,
        folder: Path,
        fit: Callable[[Cluster], BlockResult],
        banks: Banks,
    ) -> None:
        """Opens the folder and compares.

        Args:
            folder: Folder of the written model.
            fit: Gives the fits of layers once more.
            banks: What layers share.

        Raises:
            WriteError: It does not load, or a layer is not what was fitted.
        """
        source = self.outputs.source
        if self.plan.changes_model:
            with unloadable():
                Artifact.open(folder)
        written = Reopened(folder, source.model_class, source.keymap.missing)
        self._check_headers(written)
        prefixes = tuple(f"{block}." for block in self.blocks)
        for item in self.outputs.tensors:
            if item.key.startswith(prefixes) or item.key in self.outputs.positions:
                wanted = self.outputs.given(item)
                if wanted is not None and not _same(written.store.tensor(item.key), wanted):
                    raise differs(item.key, "its values are others")
        for cluster in {id(c): c for c in self.outputs.made.values()}.values():
            if cluster[0] in self.entries:
                kept = self.kept.get(cluster[0].name + cluster[0].parameter)
                result = kept or fit(cluster)
                # What is fitted again, after a kill, may differ in the last digit that is stored.
                again = kept is None and not result.block
                digit = torch.finfo(self.outputs.dtype_of(cluster[0])).eps if again else 0.0
                self._check_cluster(written, cluster, result, banks, EXACT + 16 * digit)

    def _check_headers(self, written: Reopened) -> None:
        store = written.store
        wanted = {item.key: (tuple(item.shape), item.dtype) for item in self.outputs.tensors}
        found = {key: (tuple(store.shape(key)), store.dtype(key)) for key in store.keys()}  # noqa: SIM118
        wrong = {key for key, _ in wanted.items() ^ found.items()}
        if wrong:
            raise refusal(f"{listed(wrong)} differ in name, shape or type from the plan")

    def _check_cluster(
        self, written: Reopened, cluster: Cluster, result: BlockResult, banks: Banks, slack: float
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        for entry, wanted in zip(cluster, _fitted(cluster, result, banks), strict=True):
            layer = written.layer(entry)
            rows = torch.randn(ROWS, entry.in_features, generator=generator, dtype=torch.float64)
            own, found = applied(wanted, rows), applied(layer, rows)
            change, size = (own - found).abs().max(), own.abs().max()
            if not change <= slack * size:
                raise differs(entry.name, f"its outputs are off by {change / size:.1%}")
            bias = result.biases.get(entry.name)
            if bias is not None and not _same(layer.bias, bias.to(self.outputs.dtype_of(entry))):
                raise differs(entry.name, "its bias is another")


def _fitted(cluster: Cluster, result: BlockResult, banks: Banks) -> Iterator[StructuredLinear]:
    """Builds the layers of a cluster from their fits, in float64; owners of inputs come first."""
    made: dict[str, StructuredLinear] = {}
    for entry in cluster:
        tensors = result.layers[f"{entry.name}.{entry.parameter}"].tensors
        layer = StructuredLinear(
            entry.parts,
            input_of=None if entry.input_of is None else made[entry.input_of],
            readers=entry.readers,
            banks={name: _lent(entry, name, banks) for name in entry.bank_of},
            experts=entry.experts,
            dtype=torch.float64,
        )
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(tensors[name])
        made[entry.name] = layer
        yield layer


def _lent(entry: LayerPlan, name: str, banks: Banks) -> BankModule:
    module = BankModule(bank_layouts(entry.parts)[name], torch.float64)
    exact = {key: item.double() for key, item in banks[entry.bank_of[name], name].items()}
    module.load_state_dict(exact, assign=True)
    return module


def _same(found: Tensor | None, wanted: Tensor) -> bool:
    """Whether values are equal, NaN to NaN."""
    if found is None or found.shape != wanted.shape:
        return False
    return torch.equal(found.double().nan_to_num(), wanted.double().cpu().nan_to_num())
