"""Fine-tuning: loss, trainable parameters, checkpoints, engines."""
