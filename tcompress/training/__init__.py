"""Fine-tuning and healing: objectives, teachers, the accelerate loop.

`finetuning` is the whole way: open, train, save, publish; `setup` puts together what `loop` needs;
`mixing` decides in the end which weights between the start and the best step are written.
Open `finetuning.py` first.
"""
