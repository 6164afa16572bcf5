"""Pages of the Prefect UI in a real Chromium: what a person sees of a run."""

import base64
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect, sync_playwright

TIMEOUT_MS = 60_000

RAW_MARKUP = re.compile(r"\*\*|\| ?---|!\[|\]\(|<img|&lt;|&amp;|data:image|^#{1,4} |```", re.MULTILINE)
"""What markdown or HTML leaves on screen when nobody has rendered it."""


@contextmanager
def chromium() -> Iterator[Page]:
    """A page of the browser that is installed, which talks to this machine alone."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=options)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(TIMEOUT_MS)
        page.route(re.compile(r"^https?://(?!127\.0\.0\.1[:/])"), lambda route: route.abort())
        try:
            yield page
        finally:
            browser.close()


def run_graph(page: Page, base: str, flow_run_id: str, picture: Path) -> int:
    """Opens a run; the number of colours of its graph, which is drawn on a canvas (an empty one has one)."""
    page.goto(f"{base}/v2/runs/flow-run/{flow_run_id}")
    canvas = page.locator("canvas").first
    expect(canvas).to_be_visible(timeout=TIMEOUT_MS)
    page.wait_for_timeout(4_000)  # it moves into place
    page.screenshot(path=picture)
    return page.evaluate(
        """async (bytes) => {
            const image = await createImageBitmap(await (await fetch(bytes)).blob());
            const context = new OffscreenCanvas(image.width, image.height).getContext("2d");
            context.drawImage(image, 0, 0);
            const pixels = new Uint32Array(context.getImageData(0, 0, image.width, image.height).data.buffer);
            return new Set(pixels).size;
        }""",
        "data:image/png;base64," + base64.b64encode(canvas.screenshot()).decode(),
    )


def _seen(page: Page, text: str | re.Pattern[str]) -> Locator:
    """Text on screen: the page of a card holds its raw text as well, hidden."""
    return page.get_by_text(text).filter(visible=True).first


def logs(page: Page, base: str, kind: str, run_id: str, expected: str, picture: Path) -> None:
    """Opens the logs of a flow run or a task run (`kind`), on which a line must be seen."""
    page.goto(f"{base}/v2/runs/{kind}/{run_id}?tab=Logs")
    expect(_seen(page, re.compile(expected))).to_be_visible(timeout=TIMEOUT_MS)
    page.screenshot(path=picture)


def card(page: Page, base: str, artifact_id: str, expected: str, picture: Path) -> tuple[str, list[int]]:
    """Opens a card; its text, and the width in pixels of each of its pictures as the browser has decoded it."""
    page.goto(f"{base}/v2/artifacts/artifact/{artifact_id}")
    expect(_seen(page, expected)).to_be_visible(timeout=TIMEOUT_MS)
    page.wait_for_timeout(500)
    page.screenshot(path=picture, full_page=True)
    widths = page.evaluate(
        "() => [...document.querySelectorAll('img[src^=\"data:image\"]')].map((image) => image.naturalWidth)"
    )
    return page.locator("main").first.inner_text(), widths


def submit_form(page: Page, base: str, deployment_id: str, label: str, number: str, picture: Path) -> None:
    """Opens the form of a deployment, which is filled in with its parameters, types one number and submits it."""
    page.goto(f"{base}/v2/deployments/deployment/{deployment_id}/run")
    page.get_by_label(label).fill(number)
    page.screenshot(path=picture, full_page=True)
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url(re.compile(r"tab=Runs"), timeout=TIMEOUT_MS)
