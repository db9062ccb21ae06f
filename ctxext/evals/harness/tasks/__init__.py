"""lm-eval's tasks of ctxext: a YAML file each, and the functions that they name."""
