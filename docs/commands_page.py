"""The reference of the command line as Markdown, read from the commands themselves."""

from __future__ import annotations

import inspect
import re
from typing import Any

import typer

from exitwave.workflows.cli import register_verbs
from exitwave.workflows.commands import app

__all__ = ["commands_page"]

_SHARED = ("--json", "--quiet", "--debug", "--help")


def commands_page() -> str:
    """Every verb: its help, arguments and options."""
    register_verbs()
    group: Any = typer.main.get_command(app)
    parts = [
        "# Commands",
        "Every verb also takes `--json` (one JSON document on stdout and nothing else there), `--quiet` and `--debug` "
        "(tracebacks of errors) where they make sense, and answers `--help`.",
    ]
    for name, command in group.commands.items():
        parts.append(f"## exitwave {name}")
        parts.append(_prose(command.help or ""))
        rows = [_row(each) for each in command.params if not set(each.opts) & set(_SHARED)]
        if rows:
            parts.append("\n".join(["| argument or option | meaning |", "| --- | --- |", *rows]))
    return "\n\n".join(parts) + "\n"


def _prose(text: str) -> str:
    """The terminal's marks as Markdown's: bold headings, and blocks kept as they are typed as code."""
    blocks = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        if block.startswith("\b"):
            block = block.removeprefix("\b").strip("\n")
            blocks.append("```\n" + inspect.cleandoc("\n" + block) + "\n```")
        else:
            block = re.sub(r"\[/?[a-z ]+\]", "**", block.strip())
            blocks.append(block)
    return "\n\n".join(blocks)


def _row(parameter: Any) -> str:
    is_option = parameter.param_type_name == "option"
    name = parameter.opts[0] if is_option else (parameter.metavar or parameter.human_readable_name)
    if is_option and not getattr(parameter, "is_flag", False) and parameter.metavar:
        name = f"{name} {parameter.metavar}"
    meaning = " ".join((getattr(parameter, "help", None) or "").split())
    return f"| `{_cell(name)}` | {_cell(meaning)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
