"""A release: what its files hold, and that they work in empty environments, away from the clone."""

import ast
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest
from marks import slow

import fedjax_dp

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PYTHONS = [c.split()[-1] for c in PROJECT["classifiers"] if ":: Python ::" in c]
INSTALL = ROOT / "docs" / "start" / "install.md"
ADDRESS = "https://example.org/owner/name"
PAGES = [p for f in ("docs", "experiments", "benchmarks") for p in sorted((ROOT / f).rglob("*.md"))]
published = runpy.run_path(str(ROOT / "docs" / "hooks" / "installing.py"))["published"]
with_note = runpy.run_path(str(ROOT / "docs" / "hooks" / "installing.py"))["with_note"]


def shell(command, folder, **variables):
    """Runs a command outside of the clone, without what the tests and a user's shell have set."""
    own = ("PYTHON", "JAX_", "XLA_", "FEDJAX_DP_", "VIRTUAL_ENV")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(own)}
    return subprocess.run(
        command,
        cwd=folder,
        env=kept | variables,
        shell=isinstance(command, str),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=1200,
    )


def done(command, folder, **variables):
    """What a command prints, which has to succeed."""
    ended = shell(command, folder, **variables)
    assert not ended.returncode, f"{command}\n{ended.stdout}"
    return ended.stdout


def interpreter(version):
    """A Python of a version: this one, one on the path, or one of pyenv."""
    places = [sys.executable, shutil.which(f"python{version}")]
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    places += sorted((pyenv / "versions").glob(f"{version}.*/bin/python"))
    asked = "import ensurepip, venv, sys; print('%d.%d' % sys.version_info[:2])"
    for place in filter(None, places):
        answer = subprocess.run([place, "-c", asked], capture_output=True, text=True)
        if answer.stdout.strip() == version:
            return str(place)
    return pytest.skip(f"Python {version} is not here")


def environment(python, folder):
    """An empty environment with pip, and the command that installs into it."""
    done([python, "-m", "venv", str(folder)], folder.parent)
    (own,) = (p for p in (folder / "bin/python", folder / "Scripts/python.exe") if p.exists())
    uv = shutil.which(
        "uv", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    )
    quick = [uv, "pip", "install", "-q", "--python", str(own)]
    return own, quick if uv else [str(own), "-m", "pip", "install", "-q"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The files of a release, made as the page on releasing says."""
    folder = tmp_path_factory.mktemp("release")
    own, install = environment(sys.executable, folder / "env")
    if (fetched := shell([*install, "build", "hatchling"], folder)).returncode:
        pytest.skip(f"no index has what builds packages: {fetched.stdout[-200:]}")
    lines = (ROOT / "docs" / "developing" / "releasing.md").read_text("utf-8")
    assert "REPOSITORY_URL=ADDRESS .venv/bin/python -m build\n" in lines
    words = ["build", "--no-isolation", "--outdir", str(folder / "dist")]
    done([str(own), "-m", *words], ROOT, REPOSITORY_URL=ADDRESS)
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


@slow
def test_an_index_shows_the_readme_with_links_that_lead_somewhere(wheel):
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (n for n in opened.namelist() if n.endswith("/METADATA"))
        heads, _, text = opened.read(name).decode().partition("\n\n")
    assert f"Version: {wheel.name.split('-')[1]}\n" in heads
    assert f"Project-URL: Repository, {ADDRESS}\n" in heads
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]*)\)", text)
    assert any(image for image, _ in links) and len(links) > 15
    for image, target in links:
        found = re.fullmatch(rf"{ADDRESS}/(raw|blob|tree)/v\d+\.\d+\.\d+/([^#]+)(#.*)?", target)
        assert found, target
        kind, path, _ = found.groups()
        assert (ROOT / path).is_dir() if kind == "tree" else (ROOT / path).is_file(), target
        assert (kind == "raw") == bool(image)


@slow
def test_a_package_without_an_address_has_no_relative_link(built, tmp_path):
    with tarfile.open(next(built.glob("*.tar.gz"))) as opened:
        opened.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    # Else the metadata would be those of the source distribution.
    (source / "PKG-INFO").unlink()
    python = built.parent / "env" / ("Scripts" if os.name == "nt" else "bin") / "python"
    build = [str(python), "-m", "build", "--no-isolation", "--wheel"]
    done(build, source)
    with zipfile.ZipFile(next((source / "dist").glob("*.whl"))) as opened:
        names = set(opened.namelist())
        text = opened.read(next(n for n in names if n.endswith("/METADATA"))).decode()
    assert "](" not in text and "Project-URL" not in text
    ended = shell(build, source, REPOSITORY_URL="../here")
    assert ended.returncode and "REPOSITORY_URL must be https://HOST/OWNER/NAME" in ended.stdout
    with zipfile.ZipFile(next(built.glob("*.whl"))) as opened:
        assert set(opened.namelist()) == names


@slow
def test_what_pages_and_messages_send_a_user_to_is_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        sources = {n: opened.read(n).decode() for n in names if n.endswith(".py")}
    # Of a study, files that a command of the package reads; its scripts are for a clone.
    read = r"fedjax-dp (?:[^\n`|]|\\\n)*?(experiments/[\w/.-]+\.toml)"
    asked = {path for page in PAGES for path in re.findall(read, page.read_text("utf-8"))}
    asked |= set(re.findall(read, (ROOT / "README.md").read_text("utf-8")))
    assert len(asked) > 10 and {f"fedjax_dp/configurations/{path}" for path in asked} <= names
    for page in PAGES:
        text = with_note(published(page.read_text("utf-8")))
        if re.search(r"python -m\s(experiments|benchmarks)\b", text):
            assert "clone of the repository" in " ".join(text.split()), page
    # What the package says, documentation of functions included.
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                said = re.findall(r"\b(?:docs|benchmarks|experiments)/[\w/.-]*\w", node.value)
                said = [path for path in said if (ROOT / path).exists()]
                assert {f"fedjax_dp/configurations/{path}" for path in said} <= names, (name, said)


# The smallest image, as PNG.
PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)
TRACKER = "from fedjax_dp.experiment.components import trackers as t; t._package('{}')"
# What needs an extra; a line here for each `needed_for` of the package. Matplotlib brings pillow.
NEEDS = {
    "images": "import base64; from fedjax_dp.data.datasets.formats import pixels_of; "
    f"pixels_of(base64.b64decode('{PNG}'), 't.png', (1, 1))",
    "cli": "from fedjax_dp import experiment; experiment.load_config(None)",
    "plots": "import fedjax_dp.io.plots",
    "table": "from fedjax_dp.data import datasets as d; d.load('table', path='t.csv', label='ill')",
    "hdf5": "from fedjax_dp.data.datasets import formats; formats.import_h5py('t.h5')",
    "text": "from fedjax_dp.data.tokenizers import tokenizer\n"
    "try: tokenizer('none.json')\nexcept ValueError: pass",
    "secure": "from fedjax_dp.server.secure import key_agreement as k; k.public_key_of(bytes(32))",
    "correlated": "import fedjax_dp.privacy as p; p.banded_noise(3, 2, min_separation=2)",
    "search": "import fedjax_dp.experiment.studies.search",
    "cluster": "import pathlib; from fedjax_dp.experiment.studies import executors as e\n"
    "with e._ray({}), e._submitit('local', pathlib.Path(), {}): pass",
    "mlflow": TRACKER.format("mlflow"),
    "wandb": TRACKER.format("wandb"),
    "trackio": TRACKER.format("trackio"),
    "flower": "import fedjax_dp.flower",
}
# Extras of messages that are not installed here: they take gigabytes.
LARGE = {"cuda", "tpu"}
MISSING = r"needs the package (\w+), which is not installed: (.+)"


@slow
def test_every_extra_that_a_message_names_is_tried():
    tree = [ast.parse(p.read_text("utf-8")) for p in (ROOT / "fedjax_dp").rglob("*.py")]
    calls = [n for t in tree for n in ast.walk(t) if isinstance(n, ast.Call)]
    calls = [n for n in calls if ast.unparse(n.func).lstrip("_") == "needed_for"]
    named = {n.args[1].value for n in calls if isinstance(n.args[1], ast.Constant)}
    assert named | {"mlflow", "wandb", "trackio"} == NEEDS.keys()
    assert len([n for n in calls if not isinstance(n.args[1], ast.Constant)]) == 1
    calls = [n for t in tree for n in ast.walk(t) if isinstance(n, ast.Call)]
    calls = [n for n in calls if ast.unparse(n.func) == "installing"]
    named = {n.args[0].value for n in calls if isinstance(n.args[0], ast.Constant)}
    assert LARGE <= named <= {*NEEDS, *LARGE} <= PROJECT["optional-dependencies"].keys()
    # No message or page has a way of its own.
    own = r"pip install ['\"]?(jax\[|libtpu)"
    for page in [*PAGES, *(ROOT / "fedjax_dp").rglob("*.py")]:
        assert not re.search(own, page.read_text("utf-8")), page


def followed(said, python, folder):
    """Runs the command of a message, after which its package can be imported."""
    package, command = re.search(MISSING, said).groups()
    assert command.startswith(f"{python} -m pip install "), command
    assert shell([str(python), "-c", f"import {package}"], folder).returncode
    done(f"{command} -q", folder)
    done([str(python), "-c", f"import {package}"], folder)
    return command


@slow
@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_works_in_an_empty_environment(version, wheel, tmp_path):
    """Its base and the README's example, then every extra as the message on it says."""
    python, install = environment(interpreter(version), tmp_path / "env")
    done([*install, str(wheel)], tmp_path)
    pathlib.Path(tmp_path, "t.csv").write_text("a,ill\n1,x\n2,y\n3,x\n")
    command, said = str(python.with_name("fedjax-dp")), {}

    def follow(extra):
        ask = [str(python), "-c", NEEDS[extra]]
        said[extra] = said.get(extra) or shell(ask, tmp_path).stdout
        assert followed(said[extra], python, tmp_path).endswith(f' "fedjax-dp[{extra}]"')
        done(ask, tmp_path)

    where = done([str(python), "-c", "import fedjax_dp; print(fedjax_dp.__file__)"], tmp_path)
    assert pathlib.Path(where).is_relative_to(tmp_path)
    readme = (ROOT / "README.md").read_text("utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", readme, re.M | re.S)
    assert "'client'" in done([str(python), "-c", example], tmp_path)
    follow("images")
    said["cli"] = shell([command, "run"], tmp_path).stdout
    assert said["cli"].startswith("fedjax-dp: the command line needs")
    follow("cli")
    assert wheel.name.split("-")[1] in done([command, "--version"], tmp_path)
    said["plots"] = done([command, "run", "--run.rounds=1"], tmp_path)
    assert "no plots are drawn" in said["plots"]
    follow("plots")
    # The main job, and the configurations that come with the package.
    done([command, "run", "--output", "main"], tmp_path)
    files = {path.name for path in (tmp_path / "main").rglob("*")}
    assert {"summary.json", "privacy.md", "accuracy_epsilon.png"} <= files
    words = ["experiments/comparison/tasks/digits.toml", "--run.rounds=1", "--output=digits"]
    done([command, "run", *words], tmp_path)
    assert (tmp_path / "digits" / "summary.json").is_file()
    with zipfile.ZipFile(wheel) as opened:
        names = [n for n in opened.namelist() if n.endswith(".toml") and "/experiments/" in n]
    names = [name.removeprefix("fedjax_dp/configurations/") for name in names]
    code = f"from fedjax_dp.experiment import load_config as load\nfor n in {names}: load(n)"
    done([str(python), "-c", code], tmp_path)
    for extra in [name for name in NEEDS if name not in said]:
        follow(extra)
    done([str(python), "-m", "pip", "check"], tmp_path)


@slow
def test_a_message_works_in_a_checkout_that_is_installed_or_not(tmp_path):
    python, install = environment(sys.executable, tmp_path / "env")
    if (fetched := shell([*install, "-e", str(ROOT)], tmp_path)).returncode:
        pytest.skip(f"no index has the dependencies: {fetched.stdout[-200:]}")
    said = shell([str(python), "-m", "fedjax_dp"], tmp_path).stdout
    assert followed(said, python, tmp_path).endswith(' "fedjax-dp[cli]"')
    done([str(python), "-m", "pip", "uninstall", "-qy", "fedjax-dp", "typer"], tmp_path)
    said = shell([str(python), "-m", "fedjax_dp"], tmp_path, PYTHONPATH=str(ROOT)).stdout
    assert followed(said, python, tmp_path).endswith(f' -e "{ROOT}[cli]"')
    done([str(python), "-m", "fedjax_dp", "--version"], tmp_path)


@slow
@pytest.mark.skipif(os.name == "nt", reason="the page has the paths of Linux")
def test_the_page_installs_a_wheel_on_a_machine_without_a_clone(built, tmp_path):
    section = INSTALL.read_text("utf-8").split("## From a wheel")[1].split("\n## ")[0]
    build, install = re.findall(r"^```\n(.*?)^```$", section, re.M | re.S)
    with tarfile.open(next(built.glob("*.tar.gz"))) as opened:
        opened.extractall(tmp_path, filter="data")
    (clone,) = tmp_path.iterdir()
    done([sys.executable, "-m", "venv", ".venv"], clone)
    done(f"set -e\n{build}", clone)
    machine = tmp_path / "machine"
    shutil.copytree(clone / "dist", machine / "dist")
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    done(f"set -e\n{install}", machine, PATH=path)
    assert fedjax_dp.__version__ in done([".venv/bin/fedjax-dp", "--version"], machine)


def test_pages_install_from_an_index_once_a_release_is_there():
    text = "<!-- clone -->\nIn a clone:\n<!-- end -->\n\n```\npip install -e '.[cli,plots]'\n```\n"
    assert published(text, False) == "In a clone:\n\n```\npip install -e '.[cli,plots]'\n```\n"
    assert published(text, True) == "```\npip install 'fedjax-dp[cli,plots]'\n```\n"
    page = "# A page\n\nText, and `python -m\nbenchmarks.peers`.\n"
    assert with_note(page).splitlines()[2].startswith("Commands that begin with `python -m bench")
    known = page + "This needs a clone of the\nrepository.\n"
    assert with_note(known) == known


def test_the_citation_and_the_changelog_are_of_the_version():
    version = fedjax_dp.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    first = re.search(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)[1]
    assert first in ("Unreleased", version)
