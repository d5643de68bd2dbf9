"""One walk of the dense model: moments of what layers read, without anything that is rewritten."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tcompress.anatomy import Anatomy, Block
from tcompress.calibrate.skeleton import Skeleton
from tcompress.calibrate.streams import Stream, intercept_blocks
from tcompress.conversion.backward import Worth
from tcompress.conversion.capture import first_tensor
from tcompress.conversion.experts import TokenRows
from tcompress.errors import DataError
from tcompress.source import SourceModel
from tcompress.structures.pointwise import channels_last


def input_moments(
    source: SourceModel,
    anatomy: Anatomy,
    wanted: Collection[str],
    batches: Sequence[Mapping[str, Tensor]],
    device: torch.device,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[str, dict[str, Worth]]]:
    """Runs all batches through the dense model, block by block.

    Args:
        source: The model.
        anatomy: Its blocks.
        wanted: Names of layers in the model.
        batches: Calibration batches.
        device: Where to compute.
        progress: Called with a block's name.

    Yields:
        A block's name, and the moments of the inputs of its layers by name; nothing is known of
        outputs.

    Raises:
        DataError: The model does not run its blocks one after another.
    """
    blocks = {block.name: block for block in anatomy.blocks}
    skeleton = Skeleton(source, list(blocks), device)
    own = intercept_blocks(skeleton.model, list(blocks))
    moved = [{key: value.to(device) for key, value in batch.items()} for batch in batches]
    streams = [Stream(skeleton.model, batch) for batch in moved]
    try:
        for stream in streams:
            stream.start()
        while blocks and streams[0].call is not None:
            names = {stream.call.block if stream.call else "" for stream in streams}
            block = blocks.pop(names.pop(), None)
            if names or block is None:
                raise DataError(
                    "the model does not run its blocks one after another",
                    "convert this model without data: `--calib none`",
                )
            progress(block.name)
            module = skeleton.load_block(block.name)
            with _Watch(module, block, wanted, device) as watch:
                for stream in streams:
                    call = stream.call
                    assert call is not None
                    watch.begin(stream.batch)
                    with torch.no_grad():
                        answer = own[block.name](*call.args, **call.kwargs)
                    if blocks:  # the output head was never loaded
                        stream.answer(answer)
            skeleton.drop_block(block.name)
            yield block.name, watch.found
    finally:
        for stream in streams:
            stream.close()


class _Watch:
    """Sums what the layers of a block read."""

    def __init__(
        self, module: nn.Module, block: Block, wanted: Collection[str], device: torch.device
    ) -> None:
        self.found: dict[str, Worth] = {}
        self._rows = TokenRows(module, block)
        self._seen: set[str] = set()
        self._handles = []
        for layer in block.layers:
            if layer.name in wanted:
                self.found[layer.name] = Worth.empty(layer.in_features, 0, device)
                inside = module.get_submodule(layer.name.removeprefix(f"{block.name}."))
                hook = self._hook(layer.name, layer.role)
                self._handles.append(inside.register_forward_pre_hook(hook, with_kwargs=True))

    def begin(self, batch: Mapping[str, Tensor]) -> None:
        """Looks at another batch."""
        self._rows.batch, self._seen = batch, set()

    def _hook(self, name: str, role: str) -> Callable[..., None]:
        def seen(layer: nn.Module, args: Any, kwargs: Any) -> None:
            if name in self._seen:  # only the first call reads tokens
                return
            self._seen.add(name)
            x = channels_last(layer, first_tensor(*args, **kwargs))
            rows, mask = self._rows.of(x, name, role)
            rows = rows if mask is None else rows[mask]
            self.found[name].add(rows, rows.new_empty(len(rows), 0))

        return seen

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.close()
        for handle in self._handles:
            handle.remove()
