"""Where the files of conf/ are, and which there are; the files are the catalogue of options."""

from __future__ import annotations

from pathlib import Path


def conf_dir() -> Path:
    """The folder of options: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def options(group: str) -> list[str]:
    """What a group can be: the names of the files in conf/<group>/."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def default_options() -> dict[str, str]:
    """The default option of each group, from the lines `  - group: option` of conf/config.yaml."""
    lines = (conf_dir() / "config.yaml").read_text(encoding="utf-8").splitlines()
    pairs = (line.strip(" -").partition(": ") for line in lines if line.startswith("  - "))
    return {group: option for group, colon, option in pairs if colon}


def scale_option(name: str) -> dict[str, int | None]:
    """The values of conf/scale/<name>.yaml by key, without its name."""
    text = (conf_dir() / "scale" / f"{name}.yaml").read_text(encoding="utf-8")
    pairs = (line.partition(": ") for line in text.splitlines() if not line.startswith("#"))
    return {
        key: None if value == "null" else int(value) for key, _, value in pairs if key != "name"
    }
