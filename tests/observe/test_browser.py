"""The live page in a real browser (`make test-browser`): needs Debian's chromium and the Python package playwright."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from keepstep.resilience.fault_injection import Fault, to_environment
from tests.observe.make_runs import Writer, write_long
from tests.patience import PATIENCE_S

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="needs Debian's chromium package")]

OPENS_WITHIN_S = 2.0
TINY = [
    "model.layers=2", "model.hidden=32", "model.heads=4", "model.vocab=128", "model.seq_len=16", "data=synthetic",
    "global_batch=8", "microbatch=2", "optimizer.lr=1e-2", "schedule.warmup=2ba", "evaluate.batches=1",
    "observe.tensorboard=false", "compute.threads=1", "compute.device=cpu",
]  # fmt: skip
DESK = {"width": 1400, "height": 900}
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield started
        started.close()


@contextmanager
def served(runs: Path) -> Iterator[str]:
    """`keepstep ui` as a user starts it; gives the address it prints."""
    with serving("ui", str(runs), "--port", "0", "--no-cache") as (_, address):
        yield address


@contextmanager
def serving(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The page's process and the address it prints."""
    with subprocess.Popen([sys.executable, "-m", "keepstep", *words], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        try:
            server.stdout.readline()
            yield server, server.stdout.readline().split()[1]
        finally:
            server.terminate()


@contextmanager
def opened(browser: Any, address: str, **options: Any) -> Iterator[Any]:
    context = browser.new_context(**{"viewport": DESK, **options})
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(address)
    page.wait_for_selector("body[data-ready]", timeout=30_000)
    yield page
    context.close()
    assert errors == []


def becomes_true(page: Any, expression: str, seconds: float = 15) -> None:
    """Wait for an expression. Playwright's own waiting evaluates text in the page, which the page forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"not within {seconds:g} s: {expression}"
        page.wait_for_timeout(100)


def look_twice(page: Any) -> None:
    """Until the page has asked for the list of runs and for the run twice more: the first answers are drawn by then."""
    for path in ("**/api/runs*", "**/api/view*") * 2:
        with page.expect_response(path):
            pass


def keep_picture(page: Any, name: str) -> None:
    """Screenshots for the docs, when asked for by KEEPSTEP_SCREENSHOTS=FOLDER."""
    if folder := os.environ.get("KEEPSTEP_SCREENSHOTS"):
        page.wait_for_timeout(300)
        page.screenshot(path=Path(folder) / name)
        # A third of the size, and no difference to the eye.
        with Image.open(Path(folder) / name) as picture:
            small = picture.convert("RGB").quantize(128, dither=Image.Dither.NONE)
        small.save(Path(folder) / name, optimize=True)


def example_runs(root: Path) -> Path:
    for number, (name, lr) in enumerate([("llama-1b", 3e-4), ("llama-1b-lr6e-4", 6e-4), ("llama-1b-warm", 2e-4)]):
        writer = Writer(root / name, steps=4000, seed=number, lr=lr, ranks=16, now=time.time() - 1246 - number * 3000)
        writer.start()
        writer.take(900)
        writer.fault()
        writer.recover(lost=100)
        writer.take(1400 if number == 0 else 3200)
        if number:
            writer.finish()
    return root


def test_page_follows_a_run_through_a_lost_worker(browser: Any, tmp_path: Path) -> None:
    """A real run of two processes, one of which is killed: the page shows the loss move, the fault, the way back."""
    marks, verdict, wait = tmp_path / "marks", "#verdict[data-state={}]", {"timeout": 120_000}
    marks.mkdir()
    (tmp_path / "runs").mkdir()
    # Nothing is kept in memory, so that the way back is long enough to watch: from the checkpoint of step 100.
    words = [*TINY, f"runs_dir={tmp_path / 'runs'}", "name=live", "max_duration=260ba", "checkpoint.interval=100ba"]
    words += ["resilience.snapshot_interval=0", "--procs", "2"]
    faults = [Fault("slow", 1, 0, {"steps": 1000, "seconds": 0.05}), Fault("kill", 190, 1)]
    run = subprocess.Popen(
        [sys.executable, "-m", "keepstep", "train", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", **to_environment(faults, marks)}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        with served(tmp_path / "runs") as address, opened(browser, address) as page:
            page.wait_for_selector(verdict.format("healthy"), **wait)
            loss = page.locator("[data-figure=loss]")
            path = page.locator("[data-chart=loss] path.line")
            before, drawn = loss.inner_text(), path.get_attribute("d")
            becomes_true(page, f"document.querySelector('[data-figure=loss]').innerText !== {before!r}")
            assert path.get_attribute("d") != drawn, "the curve moved"
            assert page.locator(".tick.fault").count() == 0
            page.wait_for_selector(verdict.format("recovering"), **wait)
            assert "rank 1 was killed by SIGKILL" in page.locator("#verdict").inner_text()
            assert page.locator(".tick.fault").count() == 1
            page.wait_for_selector(verdict.format("healthy"), **wait)
            assert page.locator(".tick.restart").count() == 1
            assert "1 restart" in page.locator("#figures").inner_text()
            page.wait_for_selector(verdict.format("finished"), **wait)
        assert run.wait(PATIENCE_S) == 0
    finally:
        run.terminate()
        run.wait()


def test_page_shows_the_step_on_disk_and_no_unknown_mfu(browser: Any, tmp_path: Path) -> None:
    writer = Writer(tmp_path / "runs" / "full", steps=40, save_every=10, now=time.time() - 60)
    with_mfu = writer.line
    writer.line = lambda: {name: value for name, value in with_mfu().items() if name != "mfu"}  # type: ignore[method-assign]
    writer.start()
    writer.take(10)
    writer.save_every = 1000
    writer.take(30)
    writer.fail_to_save()
    writer.finish()
    with served(tmp_path / "runs") as address, opened(browser, address) as page:
        assert page.locator("#verdict").get_attribute("data-state") == "failed"
        assert "only step 10 is on disk" in page.locator("#verdict").inner_text()
        assert page.locator("[data-figure='on disk']").inner_text() == "step 10"
        assert "1 save skipped" in page.locator("#figures").inner_text()
        assert page.locator("#runs .about").inner_text() == "failed, step 10 of 40 on disk"
        assert page.locator("[data-figure=MFU]").count() == 0
        assert page.locator("[data-chart=mfu]").is_hidden()


def test_page_fits_themes_phones_and_paper(browser: Any, tmp_path: Path) -> None:
    with served(example_runs(tmp_path / "runs")) as address:
        address += "#run=llama-1b"
        with opened(browser, address) as page:
            light = page.evaluate("getComputedStyle(document.body).backgroundColor")
            finished = page.locator(".about").nth(1).text_content()
            assert re.fullmatch(r"finished, loss [\d.]+", finished), "it fits next to the box, with its loss"
            keep_picture(page, "page-light.png")
            page.emulate_media(media="print")
            assert not page.locator(".controls").is_visible()
            assert not page.locator("nav.runs").is_visible()
            assert page.locator("[data-chart=loss] svg").is_visible()
        with opened(browser, address, color_scheme="dark") as page:
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
            keep_picture(page, "page-dark.png")
            page.click("#theme")
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == light, "the choice wins"
        for scheme in ("light", "dark"):
            phone = {"viewport": PHONE, "device_scale_factor": 2, "has_touch": True, "color_scheme": scheme}
            with opened(browser, address, **phone) as page:
                width = page.evaluate("document.documentElement.scrollWidth")
                assert width <= PHONE["width"], "nothing to scroll sideways"
                assert page.locator("#verdict").is_visible()
                keep_picture(page, f"page-phone-{scheme}.png")


def test_page_works_by_keyboard_alone(browser: Any, tmp_path: Path) -> None:
    with served(example_runs(tmp_path / "runs")) as address, opened(browser, address + "#run=llama-1b") as page:
        page.keyboard.press("l")
        assert page.get_attribute("#log", "aria-pressed") == "true"
        page.keyboard.press("o")
        becomes_true(page, "document.querySelectorAll('[data-chart=loss] path.line').length === 2")
        assert "over=" in page.evaluate("location.hash")
        keep_picture(page, "page-overlay.png")
        page.keyboard.press("j")
        becomes_true(page, "document.querySelector('#verdict').innerText.includes('llama-1b-')")
        page.focus("[data-chart=loss] .plot")
        page.keyboard.press("ArrowLeft")
        assert page.locator("[data-chart=loss] .tip").is_visible()
        page.keyboard.press("+")
        becomes_true(page, "location.hash.includes('range=')")
        page.keyboard.press("0")
        becomes_true(page, "!location.hash.includes('range=')")
        page.keyboard.press("?")
        assert page.locator("dialog#keys").is_visible()
        page.keyboard.press("Escape")
        assert not page.locator("dialog#keys").is_visible()


def drawn_value(page: Any, chart: str, at: float) -> dict[str, str]:
    """Labels and numbers of a chart's tooltip, with the pointer at the share `at` of the chart's width."""
    plot = page.locator(f"[data-chart={chart}] .plot")
    page.mouse.move(0, 0)
    plot.hover(position={"x": 52 + (plot.bounding_box()["width"] - 62) * at, "y": 60}, force=True)
    tip = page.locator(f"[data-chart={chart}] .tip")
    if tip.is_hidden():
        return {}
    step, *rows = tip.locator("> div").all()
    cells = [row.locator("> *").all_text_contents() for row in rows]
    return {"step": step.inner_text().removeprefix("step ").replace(",", ""), **dict(cells)}


def test_page_tooltips_show_raw_values_and_label_smoothed_ones(browser: Any, tmp_path: Path) -> None:
    writer = Writer(tmp_path / "runs" / "jumping", steps=100, save_every=40, now=time.time() - 600)
    made = writer.line
    writer.line = lambda: {  # type: ignore[method-assign]
        **made(), "loss": 1.0 + writer.step % 2, "lr": writer.step / 1000, "memory_gib": 60.0 + writer.step % 3,
    }  # fmt: skip
    writer.start()
    writer.take(100)
    writer.finish()
    with served(tmp_path / "runs") as address, opened(browser, address + "#smooth=0.98") as page:
        for at in (0.2, 0.5, 0.9):
            loss = drawn_value(page, "loss", at)
            step = int(loss["step"])
            assert abs(step - (1 + 99 * at)) < 3
            assert float(loss["training"]) == 1 + step % 2, "the raw value"
            assert 1.2 < float(loss["smoothed"]) < 1.9
            lr = drawn_value(page, "lr", at)
            assert float(lr["training"]) == pytest.approx(int(lr["step"]) / 1000)
            memory = drawn_value(page, "memory_gib", at)
            assert float(memory["training"]) == 60 + int(memory["step"]) % 3
            assert "smoothed" not in lr | memory
        lines = map(json.loads, writer.folder.metrics.read_text().splitlines())
        valid = next(line["valid_loss"] for line in lines if line["step"] == 40 and "valid_loss" in line)
        shown = [text for name, text in drawn_value(page, "loss", 0.42).items() if name.startswith("validation")]
        assert float(shown[0]) == pytest.approx(valid, abs=0.001)


def test_page_has_no_value_beyond_the_end_of_a_run(browser: Any, tmp_path: Path) -> None:
    for name, steps in (("long", 200), ("short", 90)):
        writer = Writer(tmp_path / "runs" / name, steps=steps, save_every=1000, now=time.time() - 600)
        writer.start()
        writer.take(steps)
        writer.finish()
    with served(tmp_path / "runs") as address:
        with opened(browser, address + "#run=long&over=short") as page:
            assert {"long", "short"} <= {name.partition(",")[0] for name in drawn_value(page, "loss", 0.3)}
            assert not [name for name in drawn_value(page, "loss", 0.7) if name.startswith("short")]
            assert "long" in drawn_value(page, "loss", 0.7)
        with opened(browser, address + "#run=short&range=0~180") as page:
            assert drawn_value(page, "loss", 0.3)
            assert drawn_value(page, "loss", 0.8) == {}


def test_page_zooms_by_dragging_and_resets_by_double_click(browser: Any, tmp_path: Path) -> None:
    with served(example_runs(tmp_path / "runs")) as address, opened(browser, address + "#run=llama-1b") as page:
        box = page.locator("[data-chart=loss] .plot").bounding_box()
        page.mouse.move(box["x"] + 300, box["y"] + 80)
        page.mouse.down()
        page.mouse.move(box["x"] + 500, box["y"] + 80, steps=4)
        page.mouse.up()
        becomes_true(page, "location.hash.includes('range=')")
        first, last = map(int, re.search(r"range=(\d+)(?:~|%7E)(\d+)", page.evaluate("location.hash")).groups())
        assert 200 < first < last < 1500
        page.wait_for_selector("#reset:visible")
        page.locator("[data-chart=loss] .plot").dblclick()
        becomes_true(page, "!location.hash.includes('range=')")


def test_page_never_executes_text_of_a_run(browser: Any, tmp_path: Path) -> None:
    bad = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"
    writer = Writer(tmp_path / "<b>bold<b>", ranks=2)
    writer.start()
    writer.take(40)
    writer.event("warning", message=bad)
    writer.event("fault", what=bad)
    writer.samples.append({"step": 1, "prompt": bad, "text": bad})
    writer.folder.bfcl.mkdir()
    scores = {"categories": {bad: {"count": 4, "accuracy": 0.25}}}
    (writer.folder.bfcl / "start-native.json").write_text(json.dumps(scores))
    writer.folder.config.write_text(f"name: {bad!r}\n")
    writer.metrics.append({**writer.line(), "step": 41, "sources": {bad: {"samples": 1}}})
    (writer.folder.logs / "trainer-00000.jsonl").write_text('{"time": 1, "role": "<b>", "traceback": "<b>x</b>"}\n')
    with served(tmp_path) as address, opened(browser, address) as page:
        page.click("#logs-open summary")
        page.wait_for_selector(".traceback")
        page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        assert page.evaluate("window.hacked") is None
        assert page.locator("main img, main script, #runs b").count() == 0
        assert bad in page.locator("#samples").inner_text()
        assert bad in page.locator("#events").inner_text()
        assert page.locator("#leaderboard td").all_inner_texts() == [f"· {bad}", "25.00%", "questions", "4"]


def test_page_policy_blocks_inline_script(browser: Any, tmp_path: Path) -> None:
    """Even if a text of a run became part of the page as HTML, the policy would not let it run."""
    writer = Writer(tmp_path / "run", ranks=2)
    writer.start()
    writer.take(10)
    with served(tmp_path) as address, opened_without_errors(browser) as page:
        called: list[str] = []
        page.expose_function("marker", lambda what: called.append(what))
        page.goto(address)
        page.wait_for_selector("body[data-ready]", timeout=60_000)
        page.evaluate("""() => {
            window.blocked = 0;
            document.addEventListener("securitypolicyviolation", () => { window.blocked += 1; });
            const place = document.createElement("div");
            place.innerHTML = "<img src=x onerror='marker(1)'><a href='javascript:marker(2)'>link</a>";
            document.body.append(place);
            const script = document.createElement("script");
            script.textContent = "marker('script')";
            document.body.append(script);
            place.querySelector("a").click();
        }""")
        becomes_true(page, "window.blocked >= 3", 60)
        assert called == []


def test_page_reports_a_lost_server(browser: Any, tmp_path: Path) -> None:
    example_runs(tmp_path / "runs")
    with opened_without_errors(browser) as page:
        with served(tmp_path / "runs") as address:
            page.goto(address)
            page.wait_for_selector("body[data-ready]")
        page.wait_for_selector("#offline:visible", timeout=15_000)
        assert page.locator("#verdict").is_visible(), "what was known stays"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def opened_without_errors(browser: Any) -> Iterator[Any]:
    """A page whose failed requests are the point of the test."""
    context = browser.new_context(viewport=DESK)
    yield context.new_page()
    context.close()


def test_page_skip_link_keeps_the_run(browser: Any, tmp_path: Path) -> None:
    with served(example_runs(tmp_path / "runs")) as address, opened(browser, address + "#run=llama-1b-warm") as page:
        page.focus("a.skip")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        look_twice(page)
        assert "llama-1b-warm" in page.locator("#verdict .run").inner_text()
        assert "run=llama-1b-warm" in page.evaluate("location.hash")


def test_page_keeps_the_focus_while_the_list_is_redrawn(browser: Any, tmp_path: Path) -> None:
    focused = "document.activeElement.getAttribute('aria-label') || document.activeElement.innerText"
    with served(example_runs(tmp_path / "runs")) as address, opened(browser, address + "#run=llama-1b") as page:
        page.focus("[aria-label='compare with llama-1b-warm']")
        page.keyboard.press("Space")
        becomes_true(page, "document.querySelectorAll('[data-chart=loss] path.line').length === 2")
        assert page.evaluate(focused) == "compare with llama-1b-warm"
        page.focus("#runs li.current button")
        look_twice(page)
        assert "llama-1b" in page.evaluate(focused)


def test_page_honours_a_key_pressed_during_a_request(browser: Any, tmp_path: Path) -> None:
    """The run is finished, so that no new data draws the charts again by chance."""
    example_runs(tmp_path / "runs")
    with served(tmp_path / "runs") as address, opened(browser, address + "#run=llama-1b-warm") as page:
        axis = "[...document.querySelectorAll('[data-chart=loss] svg text')].map(t => t.textContent).join()"
        linear, held = page.evaluate(axis), list[Any]()
        page.route("**/api/view*", lambda route: route.continue_() if held else held.append(route))
        while not held:
            page.wait_for_timeout(50)
        page.keyboard.press("l")
        held[0].continue_()
        becomes_true(page, f"{axis} !== {linear!r}")


def test_page_reports_a_hanging_server_and_continues_later(browser: Any, tmp_path: Path) -> None:
    with (
        opened_without_errors(browser) as page,
        serving("ui", str(example_runs(tmp_path / "runs")), "--port", "0", "--no-cache") as (server, address),
    ):
        page.goto(address)
        page.wait_for_selector("body[data-ready]")
        server.send_signal(signal.SIGSTOP)
        try:
            page.wait_for_selector("#offline:visible", timeout=30_000)
        finally:
            server.send_signal(signal.SIGCONT)
        page.wait_for_selector("#offline", state="hidden", timeout=30_000)


def test_page_shows_the_logs_of_the_current_run(browser: Any, tmp_path: Path) -> None:
    runs = example_runs(tmp_path / "runs")
    for name in ("llama-1b", "llama-1b-warm"):
        line = {"time": 1, "level": "info", "role": "trainer", "rank": 0, "text": f"words of {name}."}
        (runs / name / "logs" / "trainer-00000.jsonl").write_text(json.dumps(line) + "\n")
    with served(runs) as address, opened(browser, address + "#run=llama-1b") as page:
        page.click("#logs-open summary")
        becomes_true(page, "document.querySelector('#logs').innerText.includes('words of llama-1b.')")
        page.click("#runs button:has-text('llama-1b-warm')")
        becomes_true(page, "document.querySelector('#logs').innerText.includes('words of llama-1b-warm.')")


def test_page_replaces_a_deleted_run_with_another(browser: Any, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name, steps in (("first", 300), ("second", 200)):
        writer = Writer(runs / name, steps=steps, ranks=2)
        writer.start()
        writer.take(steps)
        writer.finish()
    with opened_without_errors(browser) as page, served(runs) as address:
        page.goto(address + "#run=first")
        page.wait_for_selector("body[data-ready]")
        axis = "[...document.querySelectorAll('[data-chart=loss] svg text')].map(t => t.textContent).join()"
        assert "250" in page.evaluate(axis)
        shutil.rmtree(runs / "first")
        becomes_true(page, "document.querySelector('#verdict .run').innerText === 'second'")
        look_twice(page)
        assert "250" not in page.evaluate(axis)


def test_page_reports_the_error_of_the_server(browser: Any, tmp_path: Path) -> None:
    """`--token auto` makes a new token each time: a page left open must say what to do, for it never goes on."""
    words = ["ui", str(example_runs(tmp_path / "runs")), "--port", str(free_port()), "--token", "auto", "--no-cache"]
    with opened_without_errors(browser) as page:
        with serving(*words) as (_, address):
            page.goto(address)
            page.wait_for_selector("body[data-ready]")
        with serving(*words):
            told = "document.querySelector('#offline').innerText"
            becomes_true(page, f"{told}.includes('a token is needed: open the link')")
            assert "goes on by itself" not in page.evaluate(told)


def cpu_seconds() -> float:
    """CPU time of this process and everything below it: what opening takes however busy the machine is otherwise."""
    parents, spent = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
                spent[int(entry.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def ours(process: int) -> bool:
        return process == os.getpid() or (process in parents and ours(parents[process]))

    return sum(seconds for process, seconds in spent.items() if ours(process))


def test_page_opens_five_long_runs_in_time(browser: Any, tmp_path: Path) -> None:
    first = write_long(tmp_path / "run-0", 100_000, 1)
    for number in range(1, 5):
        shutil.copytree(first.root, tmp_path / f"run-{number}")
    wall, cpu = [], []
    for _ in range(3):
        with served(tmp_path) as address:
            started, spent = time.monotonic(), cpu_seconds()
            with opened(browser, address + "#run=run-0&over=run-1/run-2/run-3/run-4") as page:
                wall.append(time.monotonic() - started)
                cpu.append(cpu_seconds() - spent)
                assert page.locator("[data-chart=loss] path.line").count() == 5
                axis = page.locator("[data-chart=loss] svg text").all_text_contents()
                assert "100" in axis or "80" in axis, "the spike of 99 is in view"
        if wall[-1] < OPENS_WITHIN_S:
            break
    print(f"opened in {min(wall):.2f} s, {min(cpu):.2f} s of CPU")
    # Other work on this machine makes us wait, but does not make us compute: either number within the limit will do.
    assert min(*wall, *cpu) < OPENS_WITHIN_S
