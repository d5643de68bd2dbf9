"""Fine-tuning and healing: objectives, teachers, the accelerate loop.

`finetuning` is the whole way: open, train, save, publish. `setup` puts together what `loop` needs:
data (`training_data`, `encoded_examples`, `task_heads`), teachers (`teacher`, `teaching`) and terms
of the loss (`objectives`, `tasks`). A step is in `losses` and `teacher_outputs`; `schedule` and
`rates` say how many there are and how large, `mixing` chooses the weights at the end. Open
`finetuning.py` first.
"""
