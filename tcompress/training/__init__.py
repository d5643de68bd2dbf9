"""Fine-tuning and healing: objectives, teachers, the accelerate loop.

`finetuning` is the whole way: open, train, save, publish; `setup` puts together what `loop` needs.
Open `finetuning.py` first.
"""
