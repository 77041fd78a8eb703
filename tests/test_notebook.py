"""examples/quickstart.ipynb, executed: its cells one after another in one namespace, as a notebook would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "quickstart.ipynb"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_notebook_runs_from_end_to_end(capsys, monkeypatch):
    """Two ranks under torchrun included; each cell asserts what it shows."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    notebook = json.loads(NOTEBOOK.read_text())
    names: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            assert not cell["outputs"], f"cell {number}: outputs are not kept in the repository"
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    said = capsys.readouterr().out
    assert "relative error" in said and "× fewer (100 steps)" in said
