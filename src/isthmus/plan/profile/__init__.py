"""What a model costs, layer by layer: parameters, operations, bytes, kept tensors; and how chips compare."""
