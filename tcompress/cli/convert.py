"""`tcompress convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from tcompress.cli import attention_options as att
from tcompress.cli import depth_options as blocks
from tcompress.cli import options as opt
from tcompress.cli import scratch_options as scratch
from tcompress.cli.further import further
from tcompress.cli.job import Access, Job, Manner, perform, show_plan

EPILOG = opt.examples(
    "tcompress convert bert-base --method lprod --p 4",
    "tcompress convert minilm --method svd --target 0.25 --calib train.csv -o small",
    "tcompress convert minilm --method tt --order 3 --rank 24,48",
    "tcompress convert minilm --method auto --target 0.25",
    "tcompress convert bert-base --method auto --target-params 50M",
    "tcompress convert minilm --method svd --max-error 0.02",
    "tcompress convert minilm --keep-layers 1,3,5",
    "tcompress convert bert-base --method svd --target 0.5 --drop-layers 6",
    "tcompress convert minilm --method svd --target 0.25 --embeddings svd",
    "tcompress convert gpt2 --method tucker --share layers --target 0.25",
    "tcompress convert vit-base --method hot --structure lprod --p 4",
    "tcompress convert gpt2 --p 8 --residual-rank 16 --keep down --dry-run",
    "tcompress convert config.json --init random --method lprod --p 4",
    "tcompress convert ./my-model --recipe encoder/minilm-lprod --calib none",
)


def convert(
    context: typer.Context,
    model: opt.Model,
    recipe: opt.RecipeOption = None,
    method: opt.Method = None,
    init: scratch.Init = None,
    positions: scratch.Positions = None,
    norm: scratch.Norm = None,
    structure: att.Structure = None,
    layers: att.AttentionLayers = None,
    filter_order: att.FilterOrder = None,
    grid: att.Grid = None,
    fold: att.Fold = None,
    kernel: att.Kernel = None,
    core: att.CoreForm = None,
    memory: att.Memory = None,
    length: att.Length = None,
    p: opt.Slices = None,
    transform: opt.Transform = None,
    block: opt.BlockSize = None,
    stages: opt.Stages = None,
    tubal_rank: opt.TubalRank = None,
    rank: opt.Rank = None,
    order: opt.Order = None,
    modes: opt.Modes = None,
    apply: opt.Apply = None,
    share: opt.Share = None,
    cores: opt.Cores = None,
    tol: opt.Tol = None,
    offer: opt.Offer = None,
    trials: opt.Trials = None,
    target: opt.Target = None,
    target_params: opt.TargetParams = None,
    target_bytes: opt.TargetBytes = None,
    max_error: opt.MaxError = None,
    allocation: opt.Allocation = None,
    residual_rank: opt.ResidualRank = None,
    keep: opt.Keep = None,
    only: opt.Only = None,
    keep_layers: blocks.KeepLayers = None,
    drop_layers: blocks.DropLayers = None,
    append_layers: blocks.AppendLayers = None,
    embeddings: opt.Embeddings = None,
    embedding_target: opt.EmbeddingTarget = None,
    calib: opt.Calib = None,
    calib_samples: opt.CalibSamples = None,
    calib_columns: opt.CalibColumns = None,
    max_length: opt.MaxLength = None,
    output_moments: opt.OutputMoments = None,
    damping: opt.Damping = None,
    seed: opt.Seed = None,
    output: opt.Output = None,
    force: opt.Force = False,
    dtype: opt.DType = None,
    max_shard_size: opt.MaxShardSize = None,
    device: opt.Device = None,
    revision: opt.Revision = None,
    token: opt.Token = None,
    allow_remote_code: opt.AllowRemoteCode = False,
    dry_run: opt.DryRun = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Turn a model into a smaller one that `from_pretrained` loads: pretrained, or from scratch."""
    # By name out of the context: most of them only change values of the recipe.
    job = _job(model, {**context.params, **further(context)})
    show_plan(job) if dry_run else perform(job)


def _job(model: str, given: dict[str, Any]) -> Job:
    from tcompress.cli.settings import conversion, default_output
    from tcompress.recipe import find_recipe, parse_recipe

    recipe = parse_recipe(*find_recipe(given["recipe"])) if given["recipe"] is not None else None
    settings = conversion(given, recipe)
    folder = given["output"] or (recipe and recipe.output)
    return Job(
        model=model,
        convert=settings,
        output=Path(folder or default_output(model, settings)),
        force=given["force"],
        access=Access(given["revision"], given["token"], given["allow_remote_code"]),
        manner=Manner(given["json"], given["quiet"], given["verbose"]),
    )
