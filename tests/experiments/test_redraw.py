"""Pictures of the results come from what is stored beside them, and can be read."""

import pathlib

from drawn import flaws
from marks import slow

from experiments import redraw
from experiments.clustered_dp import figures
from fedjax_dp.io import plots

ROOT = pathlib.Path(__file__).parents[2]
# Drawn by the commands that run what they show.
OF_RUNS = {"norms_by_round", "accuracy_by_round", "norms_method", "collusion_2", "updates,first"}


@slow
def test_every_picture_of_the_results_is_drawn_anew_and_nothing_in_it_overlaps(monkeypatch):
    saved = {}
    monkeypatch.setattr(plots, "save", lambda figure, path: saved.update({path: figure}))
    monkeypatch.setattr(figures, "write", lambda output, z: None)
    redraw.main([])
    stored = {
        path
        for folder in ("experiments", "benchmarks")
        for path in (ROOT / folder).glob("**/results/**/*.png")
    }
    drawn = {pathlib.Path(path).resolve() for path in saved}
    assert drawn <= stored
    assert all(any(name in path.name for name in OF_RUNS) for path in stored - drawn)
    assert {path.with_suffix(".pdf") for path in stored} <= set(ROOT.glob("*/**/*.pdf"))
    found = {pathlib.Path(path).name: flaws(figure) for path, figure in saved.items()}
    assert not any(found.values()), found
