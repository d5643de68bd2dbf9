"""Tables, pages and JSON of what a conversion did and what was measured.

`tree` is the report as records, `model_report` fills it from a folder, `console` and `page` show
it, with figures (`headline`) and pictures (`overview_charts`) first; `table_files` writes CSV,
LaTeX and SVG. `over_seeds` groups models that differ in seeds alone. Open `tree.py` first.
"""
