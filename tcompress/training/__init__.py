"""Fine-tuning and healing: objectives, teachers, the accelerate loop."""
