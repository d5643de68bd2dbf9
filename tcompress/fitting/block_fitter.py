"""Data-aware conversion: block by block, with a dense and a compressed stream of activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import nn

from tcompress.blockwise.comparison import OutputComparison
from tcompress.blockwise.output_sampler import OutputSampler
from tcompress.blockwise.streams import Branch, PartialModel, Readings, common_block, handed_on
from tcompress.data.calibration import CalibrationData
from tcompress.errors import DataError
from tcompress.fitting.block_rewrite import (
    BlockRewriter,
    FitInputs,
    Routing,
    StreamPairs,
    dense_readings,
)
from tcompress.fitting.layer_fits import BlockResult
from tcompress.hf.build import set_module
from tcompress.models import SourceModel
from tcompress.planning.entries import Plan
from tcompress.planning.sites import roles_of, tied_to
from tcompress.structures.modules.embedding import StructuredEmbedding, TiedTable


@dataclass
class BlockFitter:
    """A walk of two streams through the model, on which every block is fitted."""

    inputs: FitInputs
    plan: Plan
    data: CalibrationData  # batches held out are only measured on
    _: KW_ONLY
    dense_source: SourceModel
    """The dense model with all its blocks, where `inputs.source` lacks some. Its states are the
    targets, so that the blocks that stay make up for those that are gone."""
    tables: Mapping[str, StructuredEmbedding]
    """Rewritten word embeddings by module path, fitted before."""
    sampler: OutputSampler | None = None
    """Compares what the model puts out before and after, on the batches held out."""

    def __post_init__(self) -> None:
        self.comparison = OutputComparison(self.sampler) if self.sampler else None
        """Outputs of the model before and after, where a sampler tells what counts."""
        source, head = self.inputs.source, self.sampler is not None
        self._blocks = {source.original_name(b.name): b for b in roles_of(source).blocks}
        self.unreached = set(self._blocks)  # blocks that the data has not come to
        names = [block.name for block in roles_of(self.dense_source).blocks]
        self._model = PartialModel(self.dense_source, names, self.inputs.device, head=head)
        for path, table in self.tables.items():
            for name in (path, *tied_to(self.dense_source, path)):
                module = self._model.model.get_submodule(name)
                if isinstance(module, nn.Embedding):  # the output head is never reached
                    branch = Branch(module, TiedTable(table, module))
                    set_module(self._model.model, name, branch)
        judged = self.data.holdout or range(len(self.data.batches))  # one sample is all there is
        batches = [
            (self.sampler.with_variants(batch), True)
            if self.sampler is not None and index in judged
            else (batch, False)
            for index, batch in enumerate(self.data.batches)
        ]
        dense = [self._model.stream(batch, keep=keep) for batch, keep in batches]
        new = [self._model.stream(batch, rewritten=True, keep=keep) for batch, keep in batches]
        self._streams = StreamPairs(self.data, dense, new)

    def run(
        self, done: Callable[[str], BlockResult | None], progress: Callable[[str], None]
    ) -> Iterator[BlockResult]:
        """Fit all blocks in the order in which the model runs them.

        Of a block that an interrupted run finished, `done` returns the stored result.
        """
        rewriter = BlockRewriter(self.inputs, self._streams, self.plan.layers, self.plan.attention)
        streams, unreached = [*self._streams.dense, *self._streams.new], self.unreached
        with self._model.paused(streams):
            while (unreached or self.sampler) and (name := common_block(streams)):
                block = self._blocks.get(name)
                if block is not None and name not in unreached:
                    raise _runs_twice(name)
                unreached.discard(name)
                with self._model.loaded(name) as dense:
                    readings = dense_readings(block, dense, self._model.forwards[name])
                    if block is None:  # only the dense model has it
                        self._advance(readings, self._model.forwards[name], None)
                        continue
                    stored = done(block.name)
                    rewritten = rewriter.rewrite(block, dense, readings, stored, progress)
                    if not unreached and self.sampler is None:  # the output head was never loaded
                        self._check_end(readings)
                    else:
                        self._advance(readings, rewritten.new.forward, rewritten.routing)
                if stored is None:
                    yield rewritten.result

    def _check_end(self, readings: Readings) -> None:
        """Make sure that no block follows the last one, such as one that runs again."""
        stream = self._streams.dense[0]
        answer = readings.answer(stream)
        try:
            stream.answer(answer)
        except Exception:  # the output head, which holds no weights: the end was reached
            return
        if stream.call is not None and stream.call.block in self._blocks:
            raise _runs_twice(stream.call.block)

    def _advance(
        self, readings: Readings, new: Callable[..., Any], routing: Routing | None
    ) -> None:
        """Answer all streams; without routing it is a block that only the dense ones run."""
        for index, dense_stream, new_stream in self._streams:
            if routing is not None:
                routing.current = index
            dense_stream.answer(readings.answer(dense_stream))
            call, answer = new_stream.waiting, self._model.answer_of(new_stream, new)
            new_stream.answer(handed_on(call, answer) if routing is None else answer)
            if self.comparison is not None and dense_stream.output is not None:
                origin = self.data.origins.get(index, self.data.name)
                self.comparison.add(
                    origin, dense_stream.output, new_stream.output, dense_stream.batch
                )
                dense_stream.output = new_stream.output = None  # at once: logits are large


def _runs_twice(block: str) -> DataError:
    return DataError(
        f"block `{block}` runs more than once in a forward pass",
        "convert this model without data: `--calib none`",
    )
