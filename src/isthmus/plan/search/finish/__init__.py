"""From the best layouts to written plans: simulated, refined, explained."""
