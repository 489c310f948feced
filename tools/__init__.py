"""Programs beside the product. A package of its own, so that nobody else's ``tools`` is imported in its place."""
