"""Why: findings with their reasons, warnings, and the origin of each decision."""
