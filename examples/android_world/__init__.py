"""Android World under the names of slime's guides: scripts, settings, prompts, environment, generate functions."""
