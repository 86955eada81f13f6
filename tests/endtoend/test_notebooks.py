"""The example notebooks, executed from the first cell to the last by Jupyter's own client, as they are stored."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOKS = Path(__file__).resolve().parents[2] / "examples" / "notebooks"


def execute(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The notebook with all its cells executed in `folder`; an exception in a cell is one here."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for variable in ("HOME", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(folder / "home"))
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return notebook


def shown(notebook) -> dict[int, dict[str, str]]:
    """What each code cell displayed, by type."""
    return {
        number: {kind: text for output in cell["outputs"] for kind, text in output.get("data", {}).items()}
        for number, cell in enumerate(notebook.cells)
        if cell["cell_type"] == "code"
    }


def words(notebook) -> str:
    return "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", ()))


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_a_data_set_is_looked_at(tmp_path, monkeypatch):
    done = execute("look-at-a-data-set.ipynb", tmp_path, monkeypatch)
    seen = shown(done)
    html = [kinds.get("text/html", "") for kinds in seen.values()]
    assert any("24 samples" in text and "<td>cbed</td>" in text for text in html)  # the data set
    assert any("xarray" in text and "thickness_A" in text for text in html)  # to_xarray
    assert sum("image/png" in kinds for kinds in seen.values()) == 3
    assert "of 24 samples are thicker than 15 Å" in words(done)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_campaign_leads_to_a_prediction(tmp_path, monkeypatch):
    pytest.importorskip("rsciio")
    done = execute("campaign-to-prediction.ipynb", tmp_path, monkeypatch)
    seen = shown(done)
    html = [kinds.get("text/html", "") for kinds in seen.values()]
    assert any("the network" in text and "64 of 64 samples" in text and "data:image/png" in text for text in html)
    assert any("8 samples" in text and "(test 8)" in text for text in html)
    assert "image/png" in seen[max(seen)]
    assert (tmp_path / "potential.hspy").exists() and (tmp_path / "runs" / "notebook" / "report.html").exists()
