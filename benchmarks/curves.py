"""Loss on held-out data against minutes of healing, of finished runs side by side.

    pip install -c constraints.txt -e '.[plots]'
    python benchmarks/curves.py docs/healing.svg "width, Muon=healed-1" "width, AdamW=healed-2"

A run is a folder that `finetune` wrote.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt

from tcompress.artifact.manifest import read_manifest


def main() -> None:
    """Draws a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path)
    parser.add_argument("runs", nargs="+", help="NAME=FOLDER of healed models")
    args = parser.parse_args()
    plt.rcParams["svg.hashsalt"] = "curves"  # the same picture of the same runs
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for said in args.runs:
        name, _, folder = said.rpartition("=")
        manifest = read_manifest(Path(folder))
        assert manifest is not None, f"{folder} was not written by tcompress"
        points = manifest.training[-1].curve
        start = points[0].seconds or 0.0
        minutes = [((point.seconds or 0.0) - start) / 60 for point in points]
        axes.plot(minutes, [point.validation for point in points], marker=".", label=name)
    axes.set(xlabel="minutes", ylabel="loss on held-out data", yscale="log")
    axes.set_yticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(args.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
