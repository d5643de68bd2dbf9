"""Parts of what a recipe says about a conversion."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tcompress.recipe.methods import MethodSpec, TableMethod
from tcompress.structures import Spec


class Section(BaseModel):
    """A mapping of a recipe: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Calibration(Section):
    """Data that the fit may look at; labels are never used."""

    source: str = Field(
        "builtin",
        description="`builtin`, `none`, a txt, csv, jsonl or parquet file, a folder of images, "
        "or a hub id",
    )
    split: str = Field("train", description="split of a hub dataset")
    columns: tuple[str, ...] = Field(
        (), description="text or image columns; guessed where not given"
    )
    samples: int = Field(1024, gt=0, description="number of texts or images")
    max_length: int = Field(256, gt=1, description="longest text, in tokens")
    batch_size: int = Field(32, gt=0, description="texts or images run together")
    holdout: float = Field(
        0.1, gt=0, lt=0.9, description="share of the samples kept back to measure errors on"
    )
    damping: float = Field(
        0.1,
        ge=0,
        description="ridge added to the moments where there is one row per regressor, in units of "
        "their mean diagonal; shrinks with more rows",
    )
    output_moments: bool | None = Field(
        None,
        description="weigh errors by what they cost the model, known from one backward pass "
        "without labels; default where `allocation` is by loss",
    )
    seed: int = Field(0, ge=0, description="seed of the choice of samples and of directions")

    def within(self, longest: int | None) -> Calibration:
        """The same with texts that are no longer than a mechanism can take."""
        if longest is None or longest >= self.max_length:
            return self
        return self.model_copy(update={"max_length": longest})


class LayerRule(Section):
    """An exception for some layers; of what several rules say, the last word counts."""

    match: str = Field(description="layer name with `*` wildcards, or `re:` and an expression")
    keep: bool = Field(False, description="leave these layers dense")
    method: MethodSpec | None = Field(None, description="another method for these layers")
    residual_rank: int | None = Field(None, ge=0, description="another residual rank")
    target: float | None = Field(None, gt=0, lt=1, description="another kept fraction")

    @model_validator(mode="after")
    def _check_size(self) -> LayerRule:
        if self.target is not None:
            refuse_two_sizes(self.method, "target")
        return self


class Embeddings(Section):
    """How the word embedding is rewritten, and with it an output head that is tied to it."""

    method: TableMethod = Field(description="structure of the table")
    target: float | None = Field(
        None, gt=0, lt=1, description="kept fraction of the table's parameters"
    )

    @model_validator(mode="after")
    def _check_size(self) -> Embeddings:
        if self.method.pools:
            raise ValueError("the word embedding shares nothing with layers: leave `share` out")
        if tol_of(self.method) is not None:
            raise ValueError("`tol` is for layers: give the table a `rank` or a `target`")
        if self.target is not None and getattr(self.method, "rank", None) is not None:
            raise ValueError(TWO_SIZES.format("target"))  # no other term stands beside a table's
        if not self.method.has_size and self.target is None:
            raise ValueError(f"`{self.method.name}` needs a size: give `target`")
        return self


DEPTH = ("keep_layers", "drop_layers", "append_layers")
"""Keys that choose blocks; allowed is one."""

BUDGETS = ("target", "target_params", "target_bytes", "max_error")
"""Fields of which a conversion takes one."""

TWO_SIZES = "`rank` and `{}` are given together, and each sets the size; allowed is one of them"


def tol_of(method: Spec | None) -> float | None:
    """Returns the tolerance of a method's options, if they have one."""
    found: float | None = getattr(method, "tol", None)
    return found


def refuse_two_sizes(method: Spec | None, budget: str) -> None:
    """Refuses a budget beside options that leave nothing to it.

    Args:
        method: The options.
        budget: Name of the field that gives the budget.

    Raises:
        ValueError: The options fix the size.
    """
    if method is not None and method.fixes_size:
        raise ValueError(TWO_SIZES.format(budget))
