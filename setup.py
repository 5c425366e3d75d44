"""The packages of the distribution; all else about it is in pyproject.toml.

The folders at the root of the checkout are installed below `slipstream`, because top-level modules named `env` or
`tools` would collide with plug-ins of users. `slipstream` itself is a namespace package.
"""

from setuptools import find_packages, setup

FOLDERS = ("learner", "rollout_servers", "models", "buffer", "rewards", "env", "sandbox", "configs", "tools")

setup(
    # Searched, not listed: a sub-package missing from a static list would silently be missing from the wheel.
    packages=[
        f"slipstream.{package}"
        for folder in FOLDERS
        for package in (folder, *(f"{folder}.{inner}" for inner in find_packages(folder)))
    ],
    package_dir={f"slipstream.{folder}": folder for folder in FOLDERS},
    package_data={"": ["py.typed", "**/*.lua", "**/*.yaml"], "slipstream.tools.dashboard": ["page/**"]},
    include_package_data=False,  # otherwise the wheel gets what MANIFEST.in adds to the sdist
)
