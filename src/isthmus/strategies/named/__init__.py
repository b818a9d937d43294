"""The named strategies: one file each, a function from a `WorkerGrid` to phases; `STRATEGIES` lists them."""
