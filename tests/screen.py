"""Screen: the explorer as its user has it, in a browser: what is to be read there, dragged and clicked."""

from __future__ import annotations

import contextlib

from helpers import wait_until
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select


class Screen:
    """An explorer in a browser, the one in an element of the page; it waits until its charts are drawn."""

    def __init__(self, browser, columns=("x", "label"), within="body"):
        self.browser, self.within = browser, within
        wait_until(lambda: all(self.bars(column) for column in columns), "the charts")

    def all(self, selector):
        return self.browser.find_elements(By.CSS_SELECTOR, f"{self.within} {selector}")

    def text(self, selector):
        script = "return document.querySelector(arguments[0])?.innerText ?? ''"
        return self.browser.execute_script(script, f"{self.within} {selector}")

    def texts(self, selector):
        """The text of each of these."""
        script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)"
        return self.browser.execute_script(script, f"{self.within} {selector}")

    def bars(self, column, color="#2f7fc1"):
        """How large the bars of a column's chart are, together: the blue ones, or all rows' behind them."""
        script = """
            const area = (bar) => bar.getAttribute("width") * bar.getAttribute("height");
            const bars = Array.from(document.querySelectorAll(arguments[0]));
            return bars.reduce((sum, bar) => sum + area(bar), 0);
        """
        chart = f'{self.within} .charts [data-column="{column}"] g[fill="{color}"] rect'
        return self.browser.execute_script(script, chart)

    def drag(self, selector, start, stop, down=0):
        """Press, move once, so that nothing in between is brushed, and let go: about the middle."""
        found = self.all(selector)[0]
        chain = ActionChains(self.browser).move_to_element_with_offset(found, start, -down // 2)
        chain.click_and_hold().move_by_offset(stop - start, down).release().perform()

    def choose(self, selector, text):
        """Choose what a list names so, once it is there, and anew where it was drawn anew meanwhile."""

        def is_done():
            with contextlib.suppress(StaleElementReferenceException, NoSuchElementException):
                for found in self.all(selector)[:1]:
                    Select(found).select_by_visible_text(text)
                    return True
            return False

        wait_until(is_done, f"{text} in {selector}")

    def has(self, selector, words):
        return lambda: words in self.text(selector)

    def click(self, selector):
        """Click on the first of these once it is there, and anew where it was drawn anew meanwhile."""

        def is_done():
            with contextlib.suppress(StaleElementReferenceException):
                for found in self.all(selector)[:1]:
                    found.click()
                    return True
            return False

        wait_until(is_done, selector)
