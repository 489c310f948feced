"""How Sphinx builds these pages. ``scripts/docs`` calls it; the order of the pages stands in ``index.md``."""

project = "Rollout Buffer"
author = "The Rollout Buffer authors"
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
suppress_warnings = ["misc.highlighting_failure"]  # JSON and shell with an ellipsis in them
nitpicky = False

# Headings get GitHub's anchors, so that a link works there and here.
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_mock_imports = ["ray"]

# Furo ships its fonts' fallbacks and scripts: a built page asks no other host for anything.
html_theme = "furo"
html_title = "Rollout Buffer"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["pages.css"]
