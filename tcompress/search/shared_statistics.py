"""What conversions of one model to several speeds measure once."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from tcompress.options.convert_options import TIMES
from tcompress.planning.entries import Plan
from tcompress.search.search import Measurements, Request, answers


@dataclass(frozen=True)
class Statistics:
    """Keeps moments, orders of channels, predicted losses and times of candidates.

    They hold for conversions that differ in nothing but their speed.
    """

    folder: Path  # for moments; whoever made it removes it
    _measured: dict[str, Measurements] = field(default_factory=dict)

    def answers(self, measured: Measurements, request: Request) -> dict[str, Plan]:
        """Answer a request; what a conversion like it has measured is not measured again."""
        if not request.plan.layers:  # fewer blocks alone: nothing is measured
            return answers(measured, request)
        recipe = request.recipe.model_copy(update=dict.fromkeys(TIMES, None))
        data = measured.data and measured.data.fingerprint
        facts = (measured.source.store.fingerprint(), data, len(request.plan.layers))
        key = " ".join([*map(str, facts), recipe.model_dump_json()])
        before = self._measured.get(key)
        moments = self.folder / str([*self._measured, key].index(key))
        if before is None:
            plans = answers(measured, request)
            self._measured[key] = measured
            request.workdir.copy_moments(moments)
            return plans
        if moments.is_dir():  # without data there are none
            shutil.copytree(moments, request.workdir.folder, dirs_exist_ok=True)
        return answers(before, request)
