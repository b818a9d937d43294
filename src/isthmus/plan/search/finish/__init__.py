"""From the best layouts to plans: simulated, refined, explained."""
