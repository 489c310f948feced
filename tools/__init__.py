"""Development programs. A package, so that no other ``tools`` package is imported instead."""
