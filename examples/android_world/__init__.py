"""Android World under the names that guides use: scripts, settings, prompts, environment, generate functions."""
