"""The documentation as a site: `make docs` writes docs/_build/index.html, which needs no network to be read.

The pages are the Markdown files beside this one, the same that a forge shows. A page that nothing links to, a
reference that leads nowhere and a docstring that does not parse are errors (`sphinx-build -W`).
"""

from __future__ import annotations

import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

project = "exitwave"
author = "The exitwave developers"
copyright = "The exitwave developers, GPL-3.0-or-later"
release = installed_version("exitwave")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": False}
autodoc_mock_imports = ["lightning"]  # an extra; its adapter is read all the same

html_theme = "furo"
html_title = "exitwave"
html_show_sourcelink = False
html_copy_source = False


def _write_commands(_app: object) -> None:
    """`reference/commands.md` from the program's own help, so that it cannot say something else."""
    from commands_page import commands_page

    (Path(__file__).parent / "reference" / "commands.md").write_text(commands_page(), encoding="utf-8")


def setup(app: Any) -> None:
    app.connect("builder-inited", _write_commands)
