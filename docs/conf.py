"""Sphinx's settings for memhier's documentation; `make docs` builds it into build/docs."""

import logging

from memhier import __version__

logging.getLogger("faiss.loader").setLevel(logging.WARNING)  # it tells how it was loaded

project = "memhier"
author = "memhier contributors"
copyright = "memhier contributors"  # Sphinx's name for it
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["examples"]

# The docstrings are NumPy's kind; types stand in signatures alone.
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_param = False
napoleon_use_ivar = True
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
add_module_names = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "memhier"

# The name of an attribute in a table of attributes is no link where several classes have one of that name.
suppress_warnings = ["ref.python"]
