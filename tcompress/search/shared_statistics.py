"""What conversions of one model to several speeds measure once."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from tcompress.options.convert_options import TIMES
from tcompress.planning.entries import Plan
from tcompress.progress import Progress
from tcompress.search.search import Decision


@dataclass
class Statistics:
    """Keeps moments, orders of channels, predicted losses and times of candidates.

    They hold for conversions that differ in nothing but their speed.
    """

    folder: Path  # for moments; whoever made it removes it
    _known: dict[str, Decision] = field(default_factory=dict)

    def answers(self, decision: Decision, progress: Progress, *, several: bool) -> dict[str, Plan]:
        """Answers a decision; what one like it has measured is not measured again."""
        if not decision.plan.layers:  # fewer blocks alone: nothing is measured
            return decision.answers(progress, several=several)
        recipe = decision.recipe.model_copy(update=dict.fromkeys(TIMES, None))
        data = decision.data and decision.data.fingerprint
        facts = (decision.source.store.fingerprint(), data, len(decision.plan.layers))
        key = " ".join([*map(str, facts), recipe.model_dump_json()])
        place, known = decision.place, self._known.get(key)
        mine = self.folder / str([*self._known, key].index(key))
        if known is None:
            found = decision.answers(progress, several=several)
            self._known[key] = decision
            place.copy_moments(mine)
            return found
        shutil.copytree(mine, place.folder, dirs_exist_ok=True)
        return known.about(decision.recipe, decision.plan, place).answers(progress, several=several)
