"""Launches a training: settings, the commands composed from them, and their execution."""
