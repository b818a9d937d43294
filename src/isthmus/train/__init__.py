"""What runs on the chips: a model cut by layers, its weights, and the training runtime."""
