"""Many conversions of one model, measured alike and compared."""
