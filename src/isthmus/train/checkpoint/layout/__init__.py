"""Layout and files of a checkpoint: safetensors and JSON, checked before they are used."""
