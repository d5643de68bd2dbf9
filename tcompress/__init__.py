"""tcompress: smaller transformers by tensor methods, saved as ordinary checkpoints."""

from __future__ import annotations

__version__ = "0.1.0"
