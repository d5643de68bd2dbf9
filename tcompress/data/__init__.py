"""Files and data sets become batches, for calibration, training and evaluation.

`tables` opens them, `examples` takes labelled and unlabelled examples out, `inputs` says what a
model's forward pass reads. Open `examples.py` first.
"""
