"""What the tutorial shows is what exitwave takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from exitwave.simulate import CampaignSpec
from exitwave.workflows.cli import register_verbs
from exitwave.workflows.commands import app
from exitwave.workflows.config import parse_document

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "tutorials" / "first-model.md").read_text(encoding="utf-8")


def test_its_configuration_goes_into_the_quickstart() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)
    changed = parse_document(shown, source="first-model.md", folder=Path()).data["campaign"]
    whole = parse_document(
        (ROOT / "workflows" / "templates" / "quickstart.yaml").read_text(encoding="utf-8"),
        source="quickstart.yaml",
        folder=Path(),
    )
    whole.data["campaign"]["structures"] = changed["structures"]
    whole.data["campaign"]["sampling"].update(changed["sampling"])
    spec = CampaignSpec.model_validate(whole.data["campaign"])
    assert spec.sampling.semiangle_mrad == 20


def test_its_commands_exist_with_their_options() -> None:
    import typer

    register_verbs()
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lines = [line.split("#")[0] for line in TEXT.splitlines() if line.startswith("exitwave ")]
    lines += re.findall(r"`(exitwave [^`]+)`", TEXT)
    assert len(lines) > 10
    for line in lines:
        words = shlex.split(line)
        options = {option for parameter in verbs[words[1]].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, line
