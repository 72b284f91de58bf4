"""What a user installs: the wheel, its dependencies and the files that travel with it."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PYPROJECT["tool"]["setuptools"]["packages"]
NOT_PACKAGED = {"tests", "scripts", "docs", "build", "dist", "runs", "wandb"}
ACCELERATE_CONFIGS = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))


def folder(package: str) -> PurePosixPath:
    """Where a package lies, relative to the repository root."""
    return PurePosixPath(*package.split(".")[1:])


def package_folders() -> set[str]:
    """Every package the repository holds, found by its ``__init__.py``."""
    tops = [path for path in ROOT.iterdir() if path.is_dir() and path.name not in NOT_PACKAGED and path.name[0] != "."]
    found = {init.parent.relative_to(ROOT) for top in tops for init in top.rglob("__init__.py")}
    return {"draftsmith"} | {".".join(["draftsmith", *path.parts]) for path in found}


def data_files() -> set[str]:
    """What a pip user needs beside the code: recipes, accelerate configs, shapes, the demo's data, benchmarks, the typing
    marker."""
    recipes = ["recipes/*.yaml", "recipes/accelerate/*.yaml", "recipes/targets/*.json", "recipes/demo/*"]
    patterns = [*recipes, "eval/benchmarks/*/*.yaml"]
    found = {path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    return {"py.typed"} | found


def requirements(*extras: str) -> dict[str, Requirement]:
    """The declared dependencies, those of the named extras included, by canonical name."""
    project = PYPROJECT["project"]
    lines = project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


def third_party_imports() -> set[str]:
    """The top-level modules that the package imports anywhere, functions included, and that are not Python's own."""
    names = set()
    for package in PACKAGES:
        for source in (ROOT / folder(package)).glob("*.py"):
            for node in ast.walk(ast.parse(source.read_text())):
                if isinstance(node, ast.Import):
                    names |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {"draftsmith"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a wheel built from a copy of the tree, so that nothing stale is picked up and nothing is left behind."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ["pyproject.toml", "README.md", "LICENSE"]:
        shutil.copy(ROOT / name, source)
    for top in {folder(package).parts[0] for package in PACKAGES if folder(package).parts}:
        shutil.copytree(ROOT / top, source / top, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*ROOT.glob("*.py"), ROOT / "py.typed"]:
        shutil.copy(path, source)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    with zipfile.ZipFile(next(out.glob("*.whl"))) as archive:
        return set(archive.namelist())


def test_every_folder_of_the_package_is_listed():
    assert set(PACKAGES) == package_folders()


def test_tests_and_scripts_are_no_packages():
    assert not (ROOT / "tests" / "__init__.py").exists()
    assert not (ROOT / "scripts" / "__init__.py").exists()


def test_wheel_installs_one_module(wheel: set[str]):
    tops = {name.split("/")[0] for name in wheel}
    version = PYPROJECT["project"]["version"]
    assert tops == {"draftsmith", f"draftsmith-{version}.dist-info"}


def test_wheel_carries_every_module(wheel: set[str]):
    expected = {
        f"draftsmith/{(folder(package) / source.name).as_posix()}"
        for package in PACKAGES
        for source in (ROOT / folder(package)).glob("*.py")
    }
    assert {name for name in wheel if name.endswith(".py")} == expected


def test_wheel_carries_the_data_files(wheel: set[str]):
    inside = {name for name in wheel if name.startswith("draftsmith/") and not name.endswith((".py", "/"))}
    assert inside == {f"draftsmith/{name}" for name in data_files()}


def test_wheel_carries_the_licence_and_the_command(wheel: set[str]):
    info = f"draftsmith-{PYPROJECT['project']['version']}.dist-info"
    assert {f"{info}/licenses/LICENSE", f"{info}/entry_points.txt"} <= wheel


def test_changelog_names_the_version():
    assert f"## [{PYPROJECT['project']['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_dependency_has_a_lower_bound():
    unbounded = [
        name
        for name, requirement in requirements("dev", "demo").items()
        if not any(specifier.operator == ">=" for specifier in requirement.specifier)
    ]
    assert not unbounded


def test_constraints_satisfy_every_bound():
    text = (ROOT / "constraints.txt").read_text()
    pins = {canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)}
    assert len(pins) == sum(1 for line in text.splitlines() if line and not line.startswith("#"))
    for name, requirement in requirements("dev", "demo").items():
        assert name in pins, f"constraints.txt lacks {name}"
        assert requirement.specifier.contains(Version(pins[name])), f"{name}=={pins[name]} is not {requirement.specifier}"


def test_every_import_is_a_declared_dependency():
    distributions = {"yaml": "pyyaml"}
    imported = {canonicalize_name(distributions.get(name, name)) for name in third_party_imports()}
    assert imported <= set(requirements("demo"))


def test_imports_run_downward_only():
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("config", ACCELERATE_CONFIGS, ids=lambda path: path.stem)
def test_accelerate_config_is_read_as_written(config: Path, monkeypatch: pytest.MonkeyPatch):
    """The launcher's own reading of the file: no unknown keys, the processes and precision that its first lines tell of."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    arguments = launch_command_parser().parse_args(["--config_file", str(config), "-m", "draftsmith.train", "X.yaml"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    assert isinstance(defaults, ClusterConfig)
    expected = {"cpu": (2, 1, "no"), "two-machines": (16, 2, "bf16"), "zero2": (8, 1, "no"), "zero3": (8, 1, "no")}
    expected = expected.get(config.stem, (8, 1, "bf16"))
    assert (arguments.num_processes, arguments.num_machines, arguments.mixed_precision) == expected
    assert arguments.use_fsdp is config.stem.startswith("fsdp")
    assert arguments.use_deepspeed is config.stem.startswith("zero")
    assert arguments.multi_gpu is (config.stem in ("ddp", "cpu", "two-machines"))
    assert f"--config_file recipes/accelerate/{config.name} " in config.read_text(), "the launch line stands on top"
    assert all(hasattr(arguments, key) for key in defaults.fsdp_config or {})


def test_fsdp_config_makes_the_plugin_it_describes(monkeypatch: pytest.MonkeyPatch):
    """From the file through the launcher's environment to the plugin that each process builds."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env
    from torch.distributed.fsdp import StateDictType

    config = ROOT / "recipes" / "accelerate" / "fsdp.yaml"
    parser = launch_command_parser()
    arguments, _, _ = _validate_launch_command(parser.parse_args(["--config_file", str(config), "-m", "draftsmith.train"]))
    for key, value in prepare_multi_gpu_env(arguments).items():
        monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.auto_wrap_policy) == (2, True, None)
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert plugin.cpu_ram_efficient_loading is False and plugin.activation_checkpointing is False


def test_the_accelerate_configs_are_there():
    assert {"cpu", "ddp", "fsdp", "fsdp-zero2", "zero2", "zero3", "two-machines"} <= {path.stem for path in ACCELERATE_CONFIGS}
