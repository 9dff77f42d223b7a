"""Executes tutorials and keeps their outputs: `python docs/tutorials/execute.py [NAME ...]`."""

import os
import pathlib
import sys
import tempfile

import nbformat
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).resolve().parent
_KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def execute(notebook: nbformat.NotebookNode) -> None:
    """Replaces the outputs of a notebook; of its metadata, the sizes of pictures remain."""
    with tempfile.TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        options = {"timeout": 1800, "record_timing": False, "coalesce_streams": True}
        NotebookClient(notebook, resources=place, **options).execute()
    notebook.metadata = {"kernelspec": _KERNEL}
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
        # What libraries write to the error stream depends on the machine and its load.
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
            for output in cell.outputs:
                if output.output_type == "stream":
                    output.text = output.text.replace("\r\n", "\n")


def main(names: list[str]) -> None:
    """Executes the named tutorials, or all."""
    # As in a pipe: no frames, colours or bars. Commands are those of this environment.
    os.environ |= {"TTY_COMPATIBLE": "0", "JAX_PLATFORMS": "cpu"}
    os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
    for path in [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        execute(notebook)
        nbformat.write(notebook, path)
        print(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
