"""Files of other runtimes, opened and run like a function of named inputs.

Nothing here knows how a file was made; `installed` says what is missing, without importing torch.
Open `sessions.py` first.
"""
