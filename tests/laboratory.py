"""Laboratory: JupyterLab or Notebook with a browser in front of it, as a reader of notebooks has them.

Everything of both lies under one folder, settings, kernels' connections and the browser's profile included:
nothing of the user's own is read or written. Both end with the `with` block, and all that they started.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import psutil
from ipykernel import kernelspec
from selenium import webdriver
from selenium.webdriver.remote.webelement import WebElement

import arrowcache

if TYPE_CHECKING:
    from typing import Self

NEEDED = ("chromium", "chromedriver")
HOW_TO_GET_THEM = "apt-get install --no-install-recommends chromium chromium-driver"
DEADLINE_SECONDS = 180.0  # a loaded machine takes long to start a browser, JupyterLab and a kernel
_END_SECONDS = 60.0
_POLL_SECONDS = 0.1
_SETTINGS: dict[str, dict[str, Any]] = {
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},  # what is out of sight is there, too
    "@jupyterlab/apputils-extension/notification": {
        "fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True,
    },
}  # fmt: skip


def missing() -> list[str]:
    """The programs that a browser needs and this machine has not."""
    return [program for program in NEEDED if shutil.which(program) is None]


class Laboratory:
    """JupyterLab or Notebook over copies of notebooks, in Chromium without a screen; a context manager.

    Args:
        folder: an empty one, for everything. Its path is short: Chromium has a socket in it, whose path has
            at most 107 bytes.
        notebooks: the files to be copied there; their kernel is this interpreter, with this library.
        theme: of JupyterLab.
        app: which of the two, by its module.
        scale: pixels of a screenshot for each of the page's.
        height: of the window, in the page's pixels.
    Raises: TimeoutError: what starts did not within DEADLINE_SECONDS; says what it wrote.
    """

    def __init__(
        self,
        folder: Path,
        *notebooks: Path,
        theme: Literal["Light", "Dark"] = "Light",
        scale: float = 1.0,
        height: int = 2000,
        app: Literal["jupyterlab", "notebook"] = "jupyterlab",
    ) -> None:
        self._folder, self._app = folder, app
        self._log = folder / "jupyterlab.log"
        self._token = secrets.token_hex(16)
        self._server: subprocess.Popen[bytes] | None = None
        self._family: set[psutil.Process] = set()
        self._browser: webdriver.Chrome | None = None
        (folder / "root").mkdir()
        for notebook in notebooks:
            shutil.copy(notebook, folder / "root")
        try:
            self._start_server({**_SETTINGS, "@jupyterlab/apputils-extension/themes": _theme(theme)})
            self._start_browser(scale, height)
        except BaseException:
            self.close()
            raise

    @property
    def browser(self) -> webdriver.Chrome:
        assert self._browser is not None, "it is closed"
        return self._browser

    def open(self, name: str) -> None:
        """Show a notebook, and wait until its kernel is ready."""
        path = {"jupyterlab": "lab/tree", "notebook": "notebooks"}[self._app]
        self.browser.get(f"{self._url}/{path}/{name}?token={self._token}&reset")  # without what was open
        self.wait_until(lambda: self._ask(_IS_READY, name), "the notebook and its kernel")
        self._ask("jupyterapp.shell.collapseLeft(); jupyterapp.shell.collapseRight()")

    def run_all(self) -> None:
        """Begin to run all cells; `has_run` tells when they have."""
        self._ask(_RUN, "notebook:run-all-cells")

    def run(self, cell: str) -> None:
        """Run the cell of that id."""
        self._ask(_RUN, "notebook:run-cell", cell)
        self.wait_until(self.has_run, f"the cell {cell}")

    def has_run(self) -> bool:
        """Whether all cells have run.

        Raises: AssertionError: one failed.
        """
        self._remember_family()
        outcome = self._ask("return window.arrowcacheOutcome")
        assert outcome in (None, "well"), f"a cell failed: {outcome}"
        return outcome is not None

    def texts(self, selector: str) -> list[str]:
        """What is written on the page at one moment, in each element that fits."""
        found: list[str] = self._ask(_TEXTS, selector)
        return found

    def output(self, cell: str, selector: str) -> list[WebElement]:
        """What is in the output of the cell of that id."""
        found: list[WebElement] = self._ask(_OUTPUT, cell, selector)
        return found

    def screenshot(self, element: WebElement) -> bytes:
        """A PNG file of an element that is no higher than the window."""
        self._ask('arguments[0].scrollIntoView({ block: "center", behavior: "instant" })', element)
        png: bytes = element.screenshot_as_png
        return png

    def wait_until(
        self, condition: Callable[[], object], what: str, seconds: float = DEADLINE_SECONDS
    ) -> None:
        """Poll until a condition holds.

        Raises: TimeoutError: it did not in time; `timeout.png` shows what was there.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                if self._browser is not None:
                    self._browser.save_screenshot(str(self._folder / "timeout.png"))
                raise TimeoutError(f"waited {seconds} s for {what}; {self._said()}")
            time.sleep(_POLL_SECONDS)

    def processes(self) -> list[str]:
        """Number and name of the browser, the server and all that they were seen to start, if they live."""
        self._remember_family()
        found = []
        for process in self._family:
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {process.name()}")
            except psutil.NoSuchProcess:
                pass
        return sorted(found)

    def close(self) -> None:
        """End the browser, the server, its kernels and what those started; what does not end is killed."""
        self._remember_family()
        browser, server = self._browser, self._server
        self._browser = self._server = None
        try:
            if browser is not None:
                browser.quit()
        finally:
            if server is not None:
                server.terminate()
            deadline = time.monotonic() + _END_SECONDS
            while self.processes() and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            for process in self._family:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    pass
            if server is not None:
                server.wait(_END_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the two of them ---------------------------------------------------------------------------

    def _start_server(self, settings: dict[str, dict[str, Any]]) -> None:
        jupyter = self._folder / "jupyter"
        kernelspec.write_kernel_spec(jupyter / "DATA" / "kernels" / "python3")
        for name, values in settings.items():
            file = jupyter / "settings" / f"{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(values))
        environment = _environment(self._folder) | {
            **{f"JUPYTER_{kind}_DIR": str(jupyter / kind) for kind in ("CONFIG", "DATA", "RUNTIME")},
            "JUPYTERLAB_SETTINGS_DIR": str(jupyter / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(jupyter / "workspaces"),
            "JUPYTER_TOKEN": self._token,
            "IPYTHONDIR": str(jupyter / "ipython"),
            "PYTHONPATH": str(Path(arrowcache.__file__).parents[1]),
        }
        command = [
            *(sys.executable, "-m", self._app, "--no-browser", "--allow-root", "--port=0"),
            *("--ip=127.0.0.1", f"--ServerApp.root_dir={self._folder / 'root'}", "--expose-app-in-browser"),
            "--LanguageServerManager.autodetect=False",
            "--LabApp.extension_manager=readonly",
        ]
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder, env=environment
            )
        self._remember_family()
        self.wait_until(lambda: self._server_is_up(jupyter / "RUNTIME"), "JupyterLab's server")

    def _server_is_up(self, runtime: Path) -> bool:
        """Whether it serves; then its address is known."""
        assert self._server is not None
        if self._server.poll() is not None:
            raise TimeoutError(f"JupyterLab's server ended; {self._said()}")
        file = runtime / f"jpserver-{self._server.pid}.json"
        try:
            self._url = f"http://127.0.0.1:{json.loads(file.read_text())['port']}"
        except (FileNotFoundError, json.JSONDecodeError):  # json: it is being written
            return False
        return True

    def _start_browser(self, scale: float, height: int) -> None:
        self._browser = start_browser(self._folder, scale, height)
        self._remember_family()

    def _ask(self, script: str, *arguments: object) -> Any:
        return self.browser.execute_script(script, *arguments)

    def _remember_family(self) -> None:
        """What the two have started so far: kernels are leaders of sessions of their own."""
        roots = [self._server] if self._server is not None else []
        if self._browser is not None:
            roots.append(self._browser.service.process)
        for root in roots:
            try:
                parent = psutil.Process(root.pid)
                self._family |= {parent, *parent.children(recursive=True)}
            except psutil.NoSuchProcess:
                pass

    def _said(self) -> str:
        return f"JupyterLab wrote:\n{self._log.read_text(errors='replace')[-4000:]}"


def start_browser(folder: Path, scale: float = 1.0, height: int = 1400) -> webdriver.Chrome:
    """Chromium without a screen, with all that it writes under a folder whose path is short."""
    options = webdriver.ChromeOptions()
    for argument in (
        "--headless=new",
        "--no-sandbox",  # root may not have one
        "--disable-dev-shm-usage",  # containers have little of it
        "--disable-gpu",
        f"--force-device-scale-factor={scale}",
        f"--window-size=1100,{height}",
        f"--user-data-dir={folder / 'chromium'}",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
    ):
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium") or ""
    service = webdriver.ChromeService(shutil.which("chromedriver"), env=_environment(folder))
    browser = webdriver.Chrome(options, service)
    browser.set_page_load_timeout(DEADLINE_SECONDS)
    browser.set_script_timeout(DEADLINE_SECONDS)
    return browser


def _theme(theme: str) -> dict[str, Any]:
    return {"theme": f"JupyterLab {theme}", "adaptive-theme": False}


def _environment(folder: Path) -> dict[str, str]:
    """This process' own, with a home and a folder for temporary files of its own."""
    made = {"HOME": folder / "home", "TMPDIR": folder / "tmp", "XDG_RUNTIME_DIR": folder / "home"}
    for path in made.values():
        path.mkdir(exist_ok=True)
    other = ("JUPYTER", "PYTEST", "MPLBACKEND")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(other)}
    return kept | {name: str(path) for name, path in made.items()}


_IS_READY = """
const panel = window.jupyterapp?.shell?.currentWidget;
const session = panel?.context?.sessionContext;
const isReady = session?.isReady && session.session?.kernel?.status === "idle";
return Boolean(panel?.context?.path === arguments[0] && panel.content.widgets.length && isReady);
"""
_TEXTS = "return Array.from(document.querySelectorAll(arguments[0])).map((element) => element.innerText)"
_OUTPUT = """
const cells = jupyterapp.shell.currentWidget.content.widgets;
const output = cells.find((cell) => cell.model.id === arguments[0]).node.querySelector(".jp-Cell-outputArea");
return Array.from(output.querySelectorAll(arguments[1]));
"""
_RUN = """
window.arrowcacheOutcome = null;
const [command, id] = arguments;
const { content } = jupyterapp.shell.currentWidget;
if (id) content.activeCellIndex = content.widgets.findIndex((cell) => cell.model.id === id);
const outcome = (says) => { window.arrowcacheOutcome = says; };
const failures = () => Array.from(content.model.cells)
  .filter((cell) => cell.type === "code")
  .flatMap((cell) => cell.outputs.toJSON())
  .filter((output) => output.output_type === "error")
  .map((output) => `${output.ename}: ${output.evalue}`);
jupyterapp.commands.execute(command).then(
  () => outcome(failures().join() || "well"),
  (error) => outcome(`not run: ${error}`),
);
"""
