"""What shell completion offers. Answers without importing torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

# Spelled out, since the registry imports torch; a test compares them with it.
METHODS = ("lprod", "svd", "lowrank", "tt", "qtt", "tucker", "auto")
TABLE_METHODS = ("svd", "lowrank", "tt", "qtt", "tucker")
MECHANISMS = ("tga", "tsa", "hot", "kronecker", "multilinear", "tam")
KERNELS = ("softmax", "favor", "smreg")
CORE_FORMS = ("cp", "aligned", "tucker")
MEMORIES = ("states", "gru")
SHARES = ("none", "heads", "layers", "model")
WAYS = ("auto", "contract", "rebuild")
TRANSFORMS = ("dct", "identity", "haar", "hadamard", "random", "dft", "learned", "fitted")
DTYPES = ("float32", "float16", "bfloat16")
INITS = ("pretrained", "random")
POSITIONS = ("host", "standard", "linear", "exponential", "harmonic", "learned")
NORMS = ("host", "tensor")
DEVICES = ("auto", "cpu", "cuda", "mps")
FORMATS = ("dense",)
CALIBRATIONS = ("builtin", "none")
TASKS = (
    "classification",
    "sts",
    "perplexity",
    "masked-lm",
    "image-classification",
    "volume-classification",
    "forecasting",
    "retrieval",
    "response-selection",
)

TRAINING_TASKS = (
    "classification",
    "regression",
    "sts",
    "masked-lm",
    "causal-lm",
    "image-classification",
    "volume-classification",
    "forecasting",
    "response-selection",
)

_RECIPE_FILES = (".yaml", ".yml", ".json")
_DATA_FILES = (".txt", ".csv", ".jsonl", ".parquet", ".npz")


def methods(incomplete: str) -> list[str]:
    """Offers structures, mechanisms, and to rewrite no layer."""
    return _starting((*METHODS, *MECHANISMS, "none"), incomplete)


def structures(incomplete: str) -> list[str]:
    """Offers structures, and none."""
    return _starting((*METHODS, "none"), incomplete)


def table_methods(incomplete: str) -> list[str]:
    """Offers structures of a table of embeddings, and none."""
    return _starting((*TABLE_METHODS, "none"), incomplete)


def kernels(incomplete: str) -> list[str]:
    """Offers kernels of Kronecker attention."""
    return _starting(KERNELS, incomplete)


def core_forms(incomplete: str) -> list[str]:
    """Offers forms of the core of TAM."""
    return _starting(CORE_FORMS, incomplete)


def memories(incomplete: str) -> list[str]:
    """Offers sources of the keys and values of TAM."""
    return _starting(MEMORIES, incomplete)


def method_lists(incomplete: str) -> list[str]:
    """Offers methods with commas between."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in structures(last)]


def structure_lists(incomplete: str) -> list[str]:
    """Offers structures with commas between."""
    before, comma, last = incomplete.rpartition(",")
    names = [name for name in METHODS if name != "auto"]
    return [f"{before}{comma}{name}" for name in _starting(names, last)]


def allocations(incomplete: str) -> list[str]:
    """Offers ways to share out a budget."""
    return _starting(("loss", "uniform"), incomplete)


def transforms(incomplete: str) -> list[str]:
    """Offers transforms."""
    return _starting(TRANSFORMS, incomplete)


def ways(incomplete: str) -> list[str]:
    """Offers ways to apply a tensor train."""
    return _starting(WAYS, incomplete)


def shares(incomplete: str) -> list[str]:
    """Offers what may share the factors of a Tucker form."""
    return _starting(SHARES, incomplete)


def dtypes(incomplete: str) -> list[str]:
    """Offers dtypes."""
    return _starting(DTYPES, incomplete)


def inits(incomplete: str) -> list[str]:
    """Offers where weights come from."""
    return _starting(INITS, incomplete)


def positions(incomplete: str) -> list[str]:
    """Offers what tables of positions may hold."""
    return _starting(POSITIONS, incomplete)


def norms(incomplete: str) -> list[str]:
    """Offers what layer norms may normalise."""
    return _starting(NORMS, incomplete)


def devices(incomplete: str) -> list[str]:
    """Offers kinds of devices."""
    return _starting(DEVICES, incomplete)


def training_tasks(incomplete: str) -> list[str]:
    """Offers tasks that can be taught."""
    return _starting(TRAINING_TASKS, incomplete)


def formats(incomplete: str) -> list[str]:
    """Offers formats of `export`."""
    return _starting(FORMATS, incomplete)


def models(incomplete: str) -> list[str]:
    """Offers local folders, then short names of well-known models."""
    from tcompress.source import ALIASES

    return [*_paths(incomplete, ()), *_starting(ALIASES, incomplete)]


def folders(incomplete: str) -> list[str]:
    """Offers local folders."""
    return list(_paths(incomplete, ()))


def calibrations(incomplete: str) -> list[str]:
    """Offers what ships, then local files and folders."""
    return [*_starting(CALIBRATIONS, incomplete), *_paths(incomplete, _DATA_FILES)]


def tasks(incomplete: str) -> list[str]:
    """Offers tasks of `evaluate`."""
    return _starting(TASKS, incomplete)


def data(incomplete: str) -> list[str]:
    """Offers local data files and folders."""
    return list(_paths(incomplete, _DATA_FILES))


def shipped_recipes(incomplete: str) -> list[str]:
    """Offers recipes that ship."""
    from tcompress.recipe import recipe_names

    return _starting(recipe_names(), incomplete)


def recipes(incomplete: str) -> list[str]:
    """Offers recipes that ship, then local files."""
    return [*shipped_recipes(incomplete), *_paths(incomplete, _RECIPE_FILES)]


def _starting(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def _paths(incomplete: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Offers folders, with a slash, and files that end as given."""
    head, slash, start = incomplete.rpartition("/")
    folder = Path(head + slash).expanduser() if slash else Path()
    try:
        items = sorted(folder.iterdir())
    except OSError:
        return
    for item in items:
        hidden = item.name.startswith(".") and not start.startswith(".")
        if hidden or not item.name.startswith(start):
            continue
        if item.is_dir():
            yield f"{head}{slash}{item.name}/"
        elif suffixes and item.name.endswith(suffixes):
            yield f"{head}{slash}{item.name}"
