"""The project's home, and how it is installed: what cards, configs and hints name."""

REPOSITORY = "https://github.com/tcompress/tcompress"
"""The Repository of `pyproject.toml`; no package index has the package yet."""

INSTALL = f"pip install git+{REPOSITORY}"
UPDATE = f"pip install --upgrade git+{REPOSITORY}"


def install_with(extra: str) -> str:
    """Writes the command that installs one of the package's extras too."""
    return f"pip install 'tcompress[{extra}] @ git+{REPOSITORY}'"
