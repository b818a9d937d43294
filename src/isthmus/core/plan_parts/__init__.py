"""Parts of a plan file: how experts, shards, kernels, formats, adapters and offload are done, beside the degrees."""
