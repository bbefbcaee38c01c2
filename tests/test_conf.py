"""The files of conf/: each option composes and is valid, and an installed WideEP has them all."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import yaml

from comm.dispatch import DISPATCHERS
from comm.placement import PLACEMENTS
from moe.conf_files import conf_dir, default_options, options
from moe.config import compose
from moe.routing import SOURCES
from moe.settings import keys

ROOT = Path(__file__).parent.parent
GROUPS = [name for name, key in keys().items() if key.group]
MOE_SHAPED = '{"hidden_size": 8, "moe_intermediate_size": 8, "num_hidden_layers": 1,\
 "num_experts": 4, "num_experts_per_tok": 2, "model_type": "mixtral"}'


def files_of(group: str, option: str, folder: Path) -> list[str]:
    """Words that an option asks for, and the file that it reads: mixtral_8x7b in one layer."""
    small = ["model=mixtral_8x7b", "layers=1"]
    if (group, option) == ("model", "hf"):
        (folder / "config.json").write_text(MOE_SHAPED)
        return [f"model.path={folder}"]
    if (group, option) == ("placement", "file"):
        (folder / "map.json").write_text(json.dumps({"physical_to_logical_map": [[*range(8)]]}))
        return [*small, f"placement.path={folder / 'map.json'}"]
    if (group, option) == ("router", "replay"):
        np.save(folder / "ids.npy", np.array([[[0, 5]], [[7, 2]]], np.int32))
        return [*small, f"router.path={folder / 'ids.npy'}"]
    if (group, option) == ("router", "counts"):
        (folder / "counts.json").write_text(json.dumps({"logical_count": [[3, 1] * 4]}))
        return [*small, f"router.path={folder / 'counts.json'}"]
    return []


@pytest.mark.parametrize(
    ("group", "option"), [(group, option) for group in GROUPS for option in options(group)]
)
def test_every_option_composes_and_carries_its_name(group, option, tmp_path):
    words = [f"{group}={option}", *files_of(group, option, tmp_path)]
    name = getattr(compose(words), group).name
    assert name == ("mixtral" if option == "hf" else option)


def test_every_entry_of_a_catalogue_is_an_option_and_the_other_way_round():
    assert set(options("router")) == set(SOURCES)
    assert set(options("dispatcher")) == set(DISPATCHERS)
    assert set(options("placement")) == {*PLACEMENTS, "balance", "file"}


def test_every_file_says_in_its_first_line_what_it_is():
    for path in conf_dir().rglob("*.yaml"):
        first = path.read_text().splitlines()[0]
        assert first.startswith("# ") and len(first) > 20, path


def test_every_folder_is_a_group_and_every_group_a_folder_with_a_default():
    folders = {path.name for path in conf_dir().iterdir() if path.is_dir()}
    assert folders - {"claims"} == set(GROUPS) == set(default_options())
    for group, option in default_options().items():
        assert option in options(group)


def test_default_options_are_what_hydra_reads():
    listed = yaml.safe_load((conf_dir() / "config.yaml").read_text())["defaults"]
    assert default_options() == {
        group: option
        for entry in listed
        if isinstance(entry, dict)
        for group, option in entry.items()
    }


def test_pyproject_names_every_package():
    """A package left out would be missing from a wheel and from nowhere else."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("moe", "comm")
        for path in (ROOT / top).rglob("*.py")
    }
    assert set(settings["packages"]) == found | {"moe.conf"}
    assert settings["package-dir"] == {"moe.conf": conf_dir().name}


def test_an_installed_copy_finds_its_options_from_any_folder(tmp_path):
    """The files that a wheel of this build would hold, put into place by the build backend."""
    pytest.importorskip("setuptools")
    build = [sys.executable, "-c", "import setuptools; setuptools.setup()", "--quiet"]
    target, scratch = tmp_path / "installed", tmp_path / "egg"
    scratch.mkdir()
    subprocess.run(
        [*build, "egg_info", "--egg-base", scratch, "build_py", "--build-lib", target],
        cwd=ROOT,
        check=True,
        timeout=60,
    )
    assert not (target / "conf").exists()
    look = "from moe import config, conf_files; print(conf_files.conf_dir()); config.compose([])"
    shown = subprocess.run(
        [sys.executable, "-c", look],
        cwd=tmp_path,
        env={"PYTHONPATH": str(target), "PYTHONDONTWRITEBYTECODE": "1"},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert Path(shown.stdout.strip()) == (target / "moe" / "conf").resolve()
