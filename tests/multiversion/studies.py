"""Studies for the tests: scripts and notebooks in a folder, replayed for real."""

import os
import sys
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook, new_output

from rearview.multiversion.execution_tree import Measurements
from rearview.multiversion.replay_study import ReplayOptions, plan_study, replay_study
from rearview.multiversion.study import study_from_files


def notebook(path, cells, outputs=None, language="python"):
    made = [new_code_cell(text) for text in cells]
    for cell, shown in zip(made, outputs or [], strict=False):
        if shown is not None:
            cell["execution_count"] = 1
            cell["outputs"] = shown
    book = new_notebook(cells=made)
    book.metadata["kernelspec"] = {"name": "x", "display_name": "x", "language": language}
    nbformat.write(book, path)
    return Path(path)


def printed(text):
    return [new_output("stream", name="stdout", text=text)]


def scripts(folder, **texts):
    files = []
    for name, text in texts.items():
        file = folder / f"{name}.py"
        file.write_text(text)
        files.append(file)
    return files


def replay(
    files,
    *,
    measurements=None,
    store=None,
    study=None,
    on_event=lambda _: None,
    python=sys.executable,
    author_folder=None,
    **options,
):
    study = study or study_from_files(files)
    chosen = ReplayOptions(**options)
    known = measurements or Measurements()
    plan = plan_study(study, chosen, known, store)
    programs = {v.name: f.read_bytes() for v, f in zip(study.versions, files, strict=True)}
    return replay_study(
        plan,
        chosen,
        known,
        programs=programs,
        environment=os.environ,
        python=python,
        store=store,
        author_folder=author_folder,
        on_event=on_event,
    )


def texts(report, version):
    """Everything a version printed."""
    found = next(v for v in report.versions if v.name == version)
    return "".join(
        output["text"]
        for cell in found.cells
        for output in cell.outputs
        if output["output_type"] == "stream" and output["name"] == "stdout"
    )
