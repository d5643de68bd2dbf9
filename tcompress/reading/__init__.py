"""Reading text, pictures and sound for a model, for whatever purpose."""
