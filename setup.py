"""The packages of the distribution; all else about it is in pyproject.toml.

The folders at the root of the checkout are installed below `slipstream`, because top-level modules named `env` or
`tools` would collide with plug-ins of users. `slipstream` itself is a namespace package.
"""

from setuptools import find_packages, setup

NOT_INSTALLED = ("bench", "bench.*")
"""Benches run in a checkout."""
FOLDERS = ("learner", "rollout_servers", "models", "buffer", "rewards", "env", "configs", "tools")

setup(
    # Searched, not listed: a sub-package missing from a static list would silently be missing from the wheel.
    packages=[
        f"slipstream.{package}"
        for folder in FOLDERS
        for package in (folder, *(f"{folder}.{inner}" for inner in find_packages(folder, exclude=NOT_INSTALLED)))
    ],
    package_dir={f"slipstream.{folder}": folder for folder in FOLDERS},
    package_data={"": ["py.typed", "**/*.lua", "**/*.yaml"]},
    exclude_package_data={"slipstream.tools": ["bench/**"]},
    include_package_data=False,  # otherwise the wheel gets what MANIFEST.in adds to the sdist
)
