"""A browser and two pages for all tests that look at pages in one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Browser, browser
from campaign_factory import again, campaign
from record_factory import HOSTILE, full_store, make_point, make_record, save

from caraml.report.page import page
from caraml.results.record import Costly, Profile


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless browser."""
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of pages: ``odd`` has everything that can go wrong, ``many`` is a campaign of several machines with its history."""
    root = tmp_path_factory.mktemp("pages")
    odd = full_store(root / "odd")
    profile = Profile(steps=3, seconds=1.0, costliest=[Costly(name=HOSTILE, calls=1, seconds=1.0, share=1.0)], reason=HOSTILE)
    hostile = make_point(benchmark=HOSTILE, seed=1, suite=HOSTILE, device=HOSTILE)
    save(odd, make_record(hostile, environment={HOSTILE: HOSTILE}, profile=profile))
    many = campaign(root / "many", points=60)
    again(many, next(record.key for record in many.records() if record.window), times=10, slower_from=6)
    found = {}
    for name, store in {"odd": odd, "many": many}.items():
        (root / f"{name}.html").write_text(page(store, store.records(), f"Page {HOSTILE}"), encoding="utf-8")
        found[name] = (root / f"{name}.html").as_uri()
    return found
