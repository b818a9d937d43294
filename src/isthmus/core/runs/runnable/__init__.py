"""What this project's runtime derives from a plan alone: planner and workers decide by the same rules."""
