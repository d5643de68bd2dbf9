"""Files and data sets become batches, for calibration, training and evaluation.

`readers` reads files and folders of every kind as rows, `tables` opens them and knows what columns
hold, `examples` takes labelled and unlabelled examples out (`labels` are what their classes are to
a head), `encoding` makes tokens and pixels of them, and `inputs` says what a model's forward pass
reads. `calibration` makes batches, of files or of what ships: a text, and what `synthetic` draws.
`generated_text` is written by a model. Open `examples.py` first.
"""
