"""Tables, pages and JSON of what a conversion did and what was measured.

`tree` is the report as records, `model_report` fills it from a folder, `console` and `page` show
it. Open `tree.py` first.
"""
