"""What a user may ask for, from YAML to models with readable errors, and the recipes that ship.

Nothing here imports torch. `schema` is what a recipe may say, `load` reads one, and changes it.
Open `schema.py` first.
"""

from tcompress.options.convert_options import Calibration as Calibration
from tcompress.options.convert_options import Convert as Convert
from tcompress.options.convert_options import Embeddings as Embeddings
from tcompress.options.library import copy_recipe as copy_recipe
from tcompress.options.library import find_recipe as find_recipe
from tcompress.options.library import recipe_names as recipe_names
from tcompress.options.library import recipe_text as recipe_text
from tcompress.options.load import change_recipe as change_recipe
from tcompress.options.load import check_recipe as check_recipe
from tcompress.options.load import choose_variants as choose_variants
from tcompress.options.load import dump_recipe as dump_recipe
from tcompress.options.load import parse_recipe as parse_recipe
from tcompress.options.method_options import method_names as method_names
from tcompress.options.method_options import replacement_names as replacement_names
from tcompress.options.schema import Recipe as Recipe
from tcompress.options.schema import Sweep as Sweep
from tcompress.options.schema import json_schema as json_schema
from tcompress.options.steps import Bench as Bench
from tcompress.options.steps import Evaluate as Evaluate
from tcompress.options.steps import Finetune as Finetune
from tcompress.options.steps import TrainingData as TrainingData
