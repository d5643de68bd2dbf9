"""Which module of a Hugging Face transformer plays which role in which block.

`families` is the table of families, `find` reads a model by it, `heads` says how an attention cuts
features into heads, and `stored` the names and shapes of stored tensors, which costs no import of
torch. Open `families.py` first.
"""

from __future__ import annotations

from tcompress.roles.families import Attention as Attention
from tcompress.roles.families import Block as Block
from tcompress.roles.families import Layer as Layer
from tcompress.roles.families import Part as Part
from tcompress.roles.families import Refusal as Refusal
from tcompress.roles.families import Roles as Roles
