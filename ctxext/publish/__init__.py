"""Extended models and extensions pushed to the hub, with cards that say what was measured."""

from ctxext.utils.extras import require

require("eval")
