"""Arrows between layers point right, siblings are strangers: read from the imports themselves."""

import ast
import functools
import pathlib
import re

import pytest
from marks import telling

import fedjax_dp

ROOT = pathlib.Path(fedjax_dp.__file__).parent
# From left to right; a layer may import what stands right of it, and itself.
LAYERS = (
    ("fedjax_dp",),
    ("cli", "extending"),
    ("flower",),
    ("experiment",),
    ("io",),
    ("audit",),
    ("engine",),
    ("algorithms",),
    ("clients", "server", "evaluation"),
    ("data", "models", "privacy"),
    ("core",),
)
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}
OUTSIDE = {"experiments", "tests", "benchmarks", "docs"}


def layer_of(module: str) -> str:
    """The layer of a dotted module of the package; the package itself is the leftmost."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in RANK else "fedjax_dp"


@functools.cache
def imported(source: str, module: str, is_package: bool) -> set[str]:
    """Every module that a source imports, at any depth of nesting, relative ones resolved."""
    found = set()
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            # `from fedjax_dp import engine` names a layer only together with what is imported.
            found |= {f"{name}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and "import_module" in (
            getattr(node.func, "id", None),
            getattr(node.func, "attr", None),
        ):
            found |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    return found


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """The imports of a source that point left, aside, or out of the package."""
    own, wrong = layer_of(module), []
    if module.split(".")[0] != "fedjax_dp":
        targets = sorted(imported(source, module, is_package))
        commands = [t for t in targets if (t + ".").startswith("fedjax_dp.cli.")]
        return [f"{module} imports {target}, which holds commands" for target in commands]
    for target in sorted(imported(source, module, is_package)):
        top = target.split(".")[0]
        if top in OUTSIDE:
            wrong.append(f"{module} imports {target}, which uses the package")
        if top != "fedjax_dp":
            continue
        other = layer_of(target)
        if other != own and RANK[other] <= RANK[own]:
            wrong.append(f"{module} ({own}) imports {target} ({other})")
    return wrong


def studies() -> dict[str, pathlib.Path]:
    """The modules that stand on the package: experiments and benchmarks."""
    found = {}
    for room in ("experiments", "benchmarks"):
        for path in sorted((ROOT.parent / room).rglob("*.py")):
            found[".".join(path.relative_to(ROOT.parent).with_suffix("").parts)] = path
    return found


def modules() -> dict[str, pathlib.Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def test_arrows_point_right():
    wrong = []
    for module, path in modules().items():
        is_package = path.name == "__init__.py"
        wrong += violations(path.read_text(encoding="utf-8"), module, is_package)
    assert not wrong, "\n".join(wrong)


# What a part of the privacy layer may import of it; all may import what lies at its top.
PRIVACY = {"mechanisms": set(), "accounting": set(), "reports": {"mechanisms", "accounting"}}


def test_parts_of_privacy_go_one_way():
    for part, below in PRIVACY.items():
        for path in (ROOT / "privacy" / part).glob("*.py"):
            targets = imported(path.read_text(encoding="utf-8"), "fedjax_dp.privacy", True)
            parts = {target.split(".")[2] for target in targets if "dp.privacy." in target}
            assert parts & set(PRIVACY) <= below | {part}, path.name


def test_studies_and_benchmarks_stand_on_the_library_and_never_on_the_commands():
    found = studies()
    assert len(found) > 20
    wrong = []
    for module, path in found.items():
        wrong += violations(path.read_text(encoding="utf-8"), module)
    assert not wrong, "\n".join(wrong)


def test_every_folder_is_a_layer():
    folders = {path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()}
    assert folders == set(RANK) - {"fedjax_dp"}


@pytest.mark.parametrize(
    "module, source",
    [
        ("fedjax_dp.data.federated", "from fedjax_dp.engine.simulate import simulation"),
        ("fedjax_dp.data.federated", "import fedjax_dp.privacy.mechanisms.noise"),
        ("fedjax_dp.models.base", "from fedjax_dp.data import sampling"),
        ("fedjax_dp.privacy.mechanisms.noise", "from ...models import base"),
        ("fedjax_dp.clients.sgd", "def f():\n    from fedjax_dp.server.mean import weighted_mean"),
        ("fedjax_dp.server.mean", "from fedjax_dp import evaluation"),
        ("fedjax_dp.server.mean", "from fedjax_dp import Model"),
        ("fedjax_dp.algorithms.fedavg", "from fedjax_dp.engine import round"),
        ("fedjax_dp.engine.round", "from fedjax_dp.io.checkpoint import save"),
        ("fedjax_dp.io.plots", "import importlib\nimportlib.import_module('fedjax_dp.cli.main')"),
        ("fedjax_dp.core.trees", "if TYPE_CHECKING:\n    from fedjax_dp.models.base import Model"),
        ("fedjax_dp.core.trees", "import fedjax_dp"),
        ("fedjax_dp.cli.run", "from experiments.fedavg import config"),
        ("fedjax_dp.experiment.running.run", "from fedjax_dp.cli.progress import Progress"),
        ("fedjax_dp.io.plots", "from fedjax_dp.experiment.schema.config import Config"),
        ("experiments.fedavg", "from fedjax_dp.cli import config"),
        ("benchmarks.run_all", "import fedjax_dp.cli.bench"),
    ],
)
def test_a_wrong_arrow_is_found(module, source):
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    "module, source",
    [
        ("fedjax_dp.clients.sgd", "from fedjax_dp.data import sampling"),
        ("fedjax_dp.server.private", "from fedjax_dp.privacy import mechanisms"),
        ("fedjax_dp.server.private", "from .base import Aggregator"),
        ("fedjax_dp.engine.round", "from fedjax_dp.core.keys import fold\nimport jax, os"),
        ("fedjax_dp", "from fedjax_dp.cli import main"),
    ],
)
def test_a_right_arrow_is_left_alone(module, source):
    assert not violations(source, module, is_package=module == "fedjax_dp")


# A sub-room may import those before it.
EXPERIMENT = ("schema", "components", "reading", "assembly", "running", "studies")


def sub_rooms(layer: str) -> dict[str, set[str]]:
    """By folder, or file beside them, of a layer: which others of the layer it imports."""
    start, found = f"fedjax_dp.{layer}.", {}
    for module, path in modules().items():
        own = module.removeprefix(start).split(".")[0]
        if module.startswith(start):
            inner = imported(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
            others = {name.removeprefix(start).split(".")[0] for name in inner if start in name}
            found.setdefault(own, set()).update(others - {own})
    return found


def circle(graph: dict[str, set[str]]) -> set[str]:
    """What is left when all that import nothing, or nothing that is left, are taken away."""
    rest = dict(graph)
    while ready := [name for name, others in rest.items() if not others & set(rest)]:
        for name in ready:
            del rest[name]
    return set(rest)


@pytest.mark.parametrize("layer", ["experiment", "engine", "privacy"])
def test_sub_rooms_have_no_circle(layer):
    graph = sub_rooms(layer)
    assert len(graph) > 3
    assert not circle(graph)


def test_sub_rooms_of_experiment_have_an_order():
    for name, others in sub_rooms("experiment").items():
        assert others <= set(EXPERIMENT[: EXPERIMENT.index(name)]), name


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == {"a", "b", "c"}


def calls_and_imports(path: pathlib.Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = imported(path.read_text(encoding="utf-8"), "fedjax_dp.x", False)
    return named | {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}


@telling
def test_the_engine_never_touches_disk():
    disk = {"open", "pathlib", "os", "io", "shutil", "np.save", "np.load", "np.savez"}
    for path in sorted((ROOT / "engine").glob("*.py")):
        assert not calls_and_imports(path) & disk, path.name


@pytest.mark.parametrize("layer", ["algorithms", "clients", "server"])
def test_declarations_leave_execution_to_the_engine(layer):
    """Compiling, donating and placing belong to the engine alone."""
    for path in sorted((ROOT / layer).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        for word in ("jax.jit", "jax.pmap", "shard_map", "device_put", "donate_argnums"):
            assert word not in text, f"{path.name} uses {word}"


def test_importing_flips_no_global_switch():
    for module, path in modules().items():
        text = path.read_text(encoding="utf-8")
        # Most modules need not be parsed.
        tree = ast.parse(text if "update" in text else "")
        functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        inside = {id(n) for f in ast.walk(tree) if isinstance(f, functions) for n in ast.walk(f)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and id(node) not in inside:
                assert "config.update" not in ast.unparse(node.func), module


def test_the_page_on_architecture_names_every_package_once():
    page = (ROOT.parent / "docs" / "architecture.md").read_text("utf-8")
    table = page.partition("| package | what it holds |")[2].partition("\n\n")[0]
    named = re.findall(r"^\| `([\w/]+)` \|", table, re.MULTILINE)
    packages = [path.parent.relative_to(ROOT).as_posix() for path in ROOT.rglob("__init__.py")]
    assert sorted(named) == sorted(set(packages) - {"."})
