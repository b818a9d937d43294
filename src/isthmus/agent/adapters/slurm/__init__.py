"""The `slurm` adapter: cards of a Slurm cluster, held by `salloc` and used by `srun`."""
