"""Which packages there are; everything else about the distribution stands in pyproject.toml.

The folders stand at the root of the checkout and are installed below `slipstream`, because top-level modules
named `env` or `tools` would collide with what users plug in. `slipstream` itself is a namespace package.
"""

from setuptools import find_packages, setup

NOT_INSTALLED = ("bench", "bench.*")
"""Benches run in a checkout."""
FOLDERS = ("learner", "rollout_servers", "buffer", "rewards", "env", "configs", "tools")

setup(
    # Searched, not listed: a sub-package missing from a static list is missing from the wheel without a word.
    packages=[
        f"slipstream.{package}"
        for folder in FOLDERS
        for package in (folder, *(f"{folder}.{inner}" for inner in find_packages(folder, exclude=NOT_INSTALLED)))
    ],
    package_dir={f"slipstream.{folder}": folder for folder in FOLDERS},
    package_data={"": ["py.typed", "**/*.lua", "**/*.yaml"]},
    include_package_data=False,  # else what MANIFEST.in adds to the sdist would be in the wheel too
)
