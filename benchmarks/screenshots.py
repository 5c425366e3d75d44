"""`python -m benchmarks.screenshots RUN RUN`, from the root of a checkout: pictures of the dashboard's views."""

import argparse
import io
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from tests.tools.dashboard.chromium import EXECUTABLE, Page, chromium
from tests.tools.dashboard.served import Server, served

COLOURS = 64
MOST_BYTES = 150_000
MOST_ODD = 300


@dataclass(frozen=True)
class Picture:
    """A view in a window.

    Attributes:
        view: its path; `{sample}`, `{group}` and `{task}` stand for one that the first run has.
        ready: element that is there when it is complete.
        click: element that is clicked first.
        runs: how many runs it shows.
    """

    name: str
    view: str
    ready: str
    width: int = 1280
    height: int = 800
    dark: bool = False
    click: str = ""
    runs: int = 1


PICTURES = (
    Picture("see-overview", "overview", ".events li", height=1120),
    Picture("see-narrow", "overview", ".uplot", width=390, height=844, dark=True),
    Picture("see-metrics", "metrics?filter=^(entropy|ess|kl_k|grad_norm)", ".uplot", height=900, dark=True),
    Picture("see-servers", "servers", ".uplot", height=720),
    Picture("see-account", "account", ".equation .key", height=740),
    Picture("see-samples", "samples/{sample}", ".token", height=560, click="[value=ratio]"),
    Picture("see-prompts", "prompts/{task}?kind=eval", ".card", height=640),
    Picture("see-groups", "groups/{group}", ".strip", height=860, dark=True),
    Picture("see-compare", "compare", "tbody tr", runs=2, height=760),
    Picture("see-run", "run", "tbody tr", height=760),
)
"""One of each view, and one of a telephone."""


def main() -> None:
    """Takes all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs; the first is shown most")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), metavar="FOLDER")
    arguments = parser.parse_args()
    if EXECUTABLE is None:
        sys.exit("there is no Chromium; install `chromium` (Debian)")
    with (
        served(*arguments.runs) as server,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        chromium(Path(profile)) as page,
    ):
        by_folder = {Path(run["folder"]).resolve(): run["id"] for run in server.get("runs")}
        runs = [by_folder[folder.resolve()] for folder in arguments.runs]
        latest = server.get(f"runs/{runs[0]}/samples", chosen="worst", sort="-step", limit=1)["samples"][0]
        task = next(task for task in server.get(f"runs/{runs[0]}/prompts") if task["kind"] == "eval")
        names = {"sample": _odd_sample(server, runs[0]), "group": latest["group_id"], "task": task["task"]}
        for picture in PICTURES:
            view = picture.view.format(**names)
            shown = ",".join(runs[: picture.runs])
            content = take(page, picture, f"{server.url}/#/{view}{'&' if '?' in view else '?'}runs={shown}")
            file = arguments.out / f"{picture.name}.png"
            file.write_bytes(content)
            print(f"{file}: {len(content) / 1000:.0f} kB")


def _odd_sample(server: Server, run: str) -> str:
    """The kept sample whose ratio is furthest from 1 at one of its tokens."""

    def distance(sample_id: str) -> float:
        stretches = server.get(f"runs/{run}/samples/{sample_id}")["stretches"]
        ratios = [ratio for part in stretches for ratio in part["tokens"].get("ratio", []) if ratio]
        return max((abs(math.log(ratio)) for ratio in ratios), default=0.0)

    listed = server.get(f"runs/{run}/samples", sort="step", limit=MOST_ODD)["samples"]
    return max((str(sample["id"]) for sample in listed), key=distance)


def take(page: Page, picture: Picture, url: str) -> bytes:
    """A PNG with few colours. Raises: RuntimeError if a view complains, or the file is too large."""
    page.show(picture.width, picture.height, dark=picture.dark)
    page.open(url)
    page.wait(f"document.querySelector('main {picture.ready}') !== null")
    if picture.click:
        page.evaluate(f"document.querySelector('{picture.click}').click()")
    page.evaluate("new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))")
    if page.problems:
        raise RuntimeError(f"{picture.name}: {page.problems}")
    whole, small = Image.open(io.BytesIO(page.screenshot())).convert("RGB"), io.BytesIO()
    whole.quantize(COLOURS, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    content = small.getvalue()
    if len(content) > MOST_BYTES:
        raise RuntimeError(
            f"{picture.name} has {len(content):,} bytes, more than {MOST_BYTES:,}: take a smaller window"
        )
    return content


if __name__ == "__main__":
    main()
