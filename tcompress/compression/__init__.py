"""The whole way from a dense model to a folder that ships: plan, convert, heal, export, measure.

Open `stages.py` first: it calls the others in their order.
"""

from tcompress.compression.stages import compress as compress
from tcompress.compression.table import Compressed as Compressed
from tcompress.compression.table import Row as Row
from tcompress.compression.working import follow as follow
