"""Models that begin at random: their configuration, and a tokenizer where there is none."""
