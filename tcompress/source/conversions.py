"""What Transformers converts on loading and in reverse on saving, without what was rewritten."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from transformers.core_model_loading import WeightConverter


def without_fusing(conversions: Iterable[Any], names: Sequence[str]) -> list[Any]:
    """Leave out of a model's conversions those that would fuse given parameters on saving."""

    def fuses(item: Any) -> bool:
        if not isinstance(item, WeightConverter):
            return False
        back = item.reverse_transform()
        return any(WeightConverter.rename_source_key(back, name)[1] for name in names)

    return [item for item in conversions if not fuses(item)]


def sparing(conversions: Iterable[Any], names: Collection[str]) -> list[Any]:
    """Make a model's conversions let empty tensors under dense names through.

    Args:
        conversions: What Transformers does on loading, and in reverse on saving.
        names: Runtime names of the empty tensors.
    """
    return [
        SparingConverter.of(item, names) if names and isinstance(item, WeightConverter) else item
        for item in conversions
    ]


class SparingConverter(WeightConverter):  # type: ignore[misc]
    """A converter that lets empty tensors under dense names through, on loading and on saving."""

    __slots__ = ("spared",)

    @classmethod
    def of(cls, converter: WeightConverter, spared: Collection[str]) -> SparingConverter:
        """Makes one of another.

        Args:
            converter: The other.
            spared: Runtime names of the empty tensors.
        """
        old = converter._original_source_patterns, converter._original_target_patterns
        made = cls(*(list(patterns) for patterns in old), operations=converter.operations)
        made.scope_prefix, made.base_model_prefix = (
            converter.scope_prefix,
            converter.base_model_prefix,
        )
        made.spared = spared
        return made

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Renames a name, unless it is spared; it may lack, or gain, the base model's prefix."""
        key = f".{source_key}"
        for name in self.spared:
            if key.endswith(f".{name}") or f".{name}".endswith(key):
                return source_key, None
        return super().rename_source_key(source_key)  # type: ignore[no-any-return]

    def copy(self, *args: Any, **kwargs: Any) -> SparingConverter:
        """Makes one with other patterns, such as the reverse ones."""
        made: SparingConverter = super().copy(*args, **kwargs)
        made.spared = self.spared
        return made
