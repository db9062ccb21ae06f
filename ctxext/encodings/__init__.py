"""Position encodings as pure maths on tensors: no transformers, no modules, no configs."""
