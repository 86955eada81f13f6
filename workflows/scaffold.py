"""`exitwave init`: the commented configurations that people start from. They are files in `templates/`."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from exitwave.ingest.errors import UsageError

__all__ = ["template_names", "template_text", "write_template"]


def template_names() -> tuple[str, ...]:
    """Names that `--template` takes, quickstart first."""
    folder = resources.files("exitwave.workflows") / "templates"
    names = sorted(item.name[:-5] for item in folder.iterdir() if item.name.endswith(".yaml"))
    return tuple(sorted(names, key=lambda n: (n != "quickstart", n)))


def template_text(name: str) -> str:
    """The template's text. Raises UsageError listing the templates that exist."""
    if name not in template_names():
        raise UsageError(f"--template {name}: no such template; there are {', '.join(template_names())}.")
    return (resources.files("exitwave.workflows") / "templates" / f"{name}.yaml").read_text(encoding="utf-8")


def write_template(name: str, path: Path) -> None:
    """Write the template to a new file; never over an existing one."""
    text = template_text(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        raise UsageError(f"{path}: exists already; it was left as it is. Choose another name.") from None
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text.replace(f" {name}.yaml", f" {path.name}"))  # its commands name this file
