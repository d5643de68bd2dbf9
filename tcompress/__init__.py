"""tcompress: smaller transformers by tensor methods, saved as ordinary checkpoints.

Importing this package is enough for `from_pretrained` to load converted models.
"""

from __future__ import annotations

from tcompress.integration.autoload import register_when_ready

__version__ = "0.1.0"

register_when_ready()
