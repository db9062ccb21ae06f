"""Fine-tuning: loss, trainable parameters, checkpoints, engines."""

from ctxext.utils.extras import require

require("train")
