"""One browser for all tests of pages that a process runs."""

from collections.abc import Iterator

import pytest
from selenium import webdriver

from pages import CHROMIUM, DRIVER, FLAGS, Tab


@pytest.fixture(scope="session")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    driver.get("about:blank")
    yield Tab(driver, tmp_path_factory.mktemp("pages"))
    driver.quit()
