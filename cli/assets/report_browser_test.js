// Tests a report in headless Chromium, as a reader uses it; see scripts/test-report.
//
// node report_browser_test.js CHROMIUM PAGE RECORDS   prints a line for each check
//
// RECORDS are the JSON lines of which the page was made. Expected numbers come from them, not from the page's data.
// Chromium is driven through its DevTools protocol over a pipe, so no package is needed beside it.
"use strict";
const assert = require("assert");
const { spawn } = require("child_process");
const fs = require("fs");
const os = require("os");
const path = require("path");

const [chromium, file, jsonl] = process.argv.slice(2);
const records = fs.readFileSync(jsonl, "utf8").trim().split("\n").map((line) => JSON.parse(line));
const address = "file://" + path.resolve(file);
const TIMEOUT = 60000;

const short = (codec) => codec.replace(":block=256", "");
const sorted = (rows) => [...rows].sort((a, b) => a.size - b.size || a.out_of_place.time_us - b.out_of_place.time_us);
const fixed = (text) => text.match(/[0-9.]+/)[0];

// A connection to a browser of its own.
class Browser {
  constructor() {
    this.profile = fs.mkdtempSync(path.join(os.tmpdir(), "cinch-report-"));
    const flags = [
      // The sandbox does not start as root, or in containers; the page is our own.
      "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
      "--disable-background-networking", "--remote-debugging-pipe", "--window-size=1280,1000",
      "--user-data-dir=" + this.profile, "about:blank",
    ];
    this.child = spawn(chromium, flags, { stdio: ["ignore", "ignore", "pipe", "pipe", "pipe"] });
    this.log = "";
    this.child.stderr.on("data", (text) => (this.log += text));
    Object.assign(this, { next: 1, waiting: new Map(), events: [] });
    let rest = "";
    this.child.stdio[4].setEncoding("utf8").on("data", (text) => {
      const messages = (rest + text).split("\0");
      rest = messages.pop();
      for (const message of messages) this.receive(JSON.parse(message));
    });
    this.ended = new Promise((resolve) => this.child.on("close", resolve));
    const stop = (why) => {
      for (const { reject } of this.waiting.values()) reject(new Error(why + "\n" + this.log));
    };
    this.child.on("error", (error) => stop(chromium + ": " + error.message));
    this.child.on("close", () => stop(chromium + " ended"));
    this.child.stdio[3].on("error", () => {});
  }

  receive(message) {
    const call = this.waiting.get(message.id);
    if (!call) return void this.events.push(message);
    this.waiting.delete(message.id);
    clearTimeout(call.timer);
    if (message.error) call.reject(new Error(call.method + ": " + message.error.message));
    else call.resolve(message.result);
  }

  call(method, params = {}) {
    const id = this.next++;
    return new Promise((resolve, reject) => {
      const timer = setTimeout(() => reject(new Error(method + ": no answer\n" + this.log)), TIMEOUT);
      this.waiting.set(id, { method, resolve, reject, timer });
      this.child.stdio[3].write(JSON.stringify({ id, method, params, sessionId: this.session }) + "\0");
    });
  }

  // Opens a tab and records its errors and requests.
  async open() {
    const { targetId } = await this.call("Target.createTarget", { url: "about:blank" });
    const { sessionId } = await this.call("Target.attachToTarget", { targetId, flatten: true });
    this.session = sessionId;
    for (const domain of ["Runtime", "Log", "Page", "Network"]) await this.call(domain + ".enable");
  }

  async visit(url) {
    // A blank page in between, because an address that differs in its end alone loads nothing.
    for (const next of ["about:blank", url]) {
      this.events = this.events.filter((event) => event.method !== "Page.loadEventFired");
      await this.call("Page.navigate", { url: next });
      const begin = Date.now();
      while (!this.events.some((event) => event.method === "Page.loadEventFired")) {
        if (Date.now() - begin > TIMEOUT) throw new Error(next + " does not load");
        await new Promise((resolve) => setTimeout(resolve, 20));
      }
    }
  }

  // Calls a function of one argument inside the page.
  async page(run, argument) {
    const expression = `(${run})(${JSON.stringify(argument)})`;
    const answer = await this.call("Runtime.evaluate", { expression, returnByValue: true, awaitPromise: true });
    if (answer.exceptionDetails) throw new Error(answer.exceptionDetails.exception.description);
    return answer.result.value;
  }

  mouse(type, x, y, more = {}) {
    return this.call("Input.dispatchMouseEvent", { type, x, y, ...more });
  }

  async close() {
    this.session = undefined;
    await this.call("Browser.close").catch(() => this.child.kill("SIGKILL"));
    await this.ended;
    fs.rmSync(this.profile, { recursive: true, force: true, maxRetries: 10 });
  }
}

// Functions that run inside the page.
const texts = (selector) => [...document.querySelectorAll(selector)].map((element) => element.textContent);
const chartRect = (number) => {
  const chart = document.querySelectorAll(".u-over")[number];
  chart.scrollIntoView({ block: "center" });
  const { left, top, width, height } = chart.getBoundingClientRect();
  return { left, top, width, height };
};
const legendOf = (number) => {
  const rows = document.querySelectorAll(".u-legend")[number].querySelectorAll(".u-series");
  return [...rows].map((row) => [row.querySelector(".u-label").textContent, row.querySelector(".u-value").textContent]);
};
const choose = ([number, value]) => {
  const select = document.querySelectorAll("#filters select")[number];
  select.value = value;
  select.dispatchEvent(new Event("change", { bubbles: true }));
};
// Number of pixels of a chart in the colour of its first line.
const colored = (number) => {
  const canvas = document.querySelectorAll("canvas")[number];
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let found = 0;
  for (let at = 0; at < data.length; at += 4) {
    found += data[at] === 0x44 && data[at + 1] === 0x77 && data[at + 2] === 0xaa && data[at + 3] === 255;
  }
  return found;
};
const frame = () => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(() => resolve())));

// Moves the mouse to a place of a chart, as fractions of its width and height; returns the legend.
async function hover(browser, chart, x) {
  const { left, top, width, height } = await browser.page(chartRect, chart);
  await browser.mouse("mouseMoved", left + width * x - 3, top + height / 2);
  await browser.mouse("mouseMoved", left + width * x, top + height / 2);
  await browser.page(frame);
  return browser.page(legendOf, chart);
}

const bytes = (label) => parseFloat(label) * 1024 ** " KMGT".indexOf((label.match(/[KMGT]/) || " ")[0]);

const checks = {
  async "first screen has the numbers of the records"(browser) {
    assert.equal((await browser.page(texts, "#totals"))[0], records.length + " rows; all values are right");
    const found = await browser.page(() =>
      [...document.querySelectorAll("#summary tr")].slice(1).map((row) => [...row.children].map((it) => it.textContent))
    );
    const key = (row) => row.type + " " + short(row.codec);
    assert.equal(found.length, new Set(records.map(key)).size);
    for (const [title, codec, small, large, , beside, error] of found) {
      const own = sorted(records.filter((row) => title.includes(" of " + row.type + ",") && short(row.codec) === codec));
      const largest = own.filter((row) => row.size === own.at(-1).size)[0];
      assert.equal(fixed(small), own[0].out_of_place.time_us.toFixed(2), title + " " + codec);
      assert.ok(small.endsWith(" us for " + own[0].size + " B"), small);
      assert.equal(fixed(large), largest.out_of_place.eff_bus_bw.toFixed(2), title + " " + codec);
      assert.equal(bytes(large.split(" for ")[1]), largest.size);
      const ratios = own.filter((row) => row.vs).map((row) => row.vs.ratio);
      const range = ratios.length
        ? Math.min(...ratios).toFixed(2) + "x to " + Math.max(...ratios).toFixed(2) + "x"
        : "-";
      assert.equal(beside, range, title + " " + codec);
      const runs = own.flatMap((row) => [row.out_of_place, row.in_place || {}]);
      const worst = Math.max(...runs.map((run) => run.rms_rel_err || 0));
      assert.equal(error, worst.toExponential(2), title + " " + codec);
    }
    const line = () => document.querySelector("#summary tr:nth-child(2)").getBoundingClientRect().bottom;
    const bottom = await browser.page(line);
    assert.ok(bottom > 0 && bottom < 1000, "the first line of numbers is at " + bottom);
  },

  async "every chart is drawn"(browser) {
    const count = await browser.page(() => document.querySelectorAll("canvas").length);
    assert.ok(count > 3, count + " charts");
    for (let chart = 0; chart < count; chart++) assert.ok((await browser.page(colored, chart)) > 100, "chart " + chart);
  },

  async "a click on a line of the summary leads to its section"(browser) {
    await browser.page(() => scrollTo(0, 0));
    const { x, y } = await browser.page(() => {
      const { left, top } = document.querySelector("#summary tr:last-child td").getBoundingClientRect();
      return { x: left + 5, y: top + 5 };
    });
    for (const type of ["mousePressed", "mouseReleased"]) {
      await browser.mouse(type, x, y, { button: "left", clickCount: 1 });
    }
    await browser.page(frame);
    assert.ok((await browser.page(() => scrollY)) > 100);
  },

  async "a mouse over a line shows the record's numbers"(browser) {
    const [[, size], ...lines] = await hover(browser, 0, 0.5);
    const shown = lines.filter(([name, value]) => value !== "-" && !name.startsWith("NCCL"));
    assert.ok(shown.length > 0, JSON.stringify(lines));
    const first = records[0];
    for (const [name, value] of shown) {
      const [codec, mode] = name.split(", ");
      const row = records.find((row) =>
        row.type === first.type && short(row.codec) === codec && row.mode === mode && row.size === bytes(size));
      assert.ok(row, name + " has no row of " + size);
      assert.equal(value, String(+row.out_of_place.time_us.toPrecision(4)), name + " at " + size);
    }
  },

  async "dragging zooms, a double click resets"(browser) {
    const sizeAt = async (x) => bytes((await hover(browser, 0, x))[0][1]);
    const whole = [await sizeAt(0.02), await sizeAt(0.98)];
    const { left, top, width, height } = await browser.page(chartRect, 0);
    const y = top + height / 2;
    const at = (x) => left + width * x;
    await browser.mouse("mouseMoved", at(0.3), y);
    await browser.mouse("mousePressed", at(0.3), y, { button: "left", buttons: 1, clickCount: 1 });
    for (const x of [0.4, 0.5, 0.6]) await browser.mouse("mouseMoved", at(x), y, { button: "left", buttons: 1 });
    await browser.mouse("mouseReleased", at(0.6), y, { button: "left", clickCount: 1 });
    const zoomed = [await sizeAt(0.02), await sizeAt(0.98)];
    assert.ok(zoomed[0] > whole[0] && zoomed[1] < whole[1], whole + " became " + zoomed);
    for (const clickCount of [1, 2]) {
      await browser.mouse("mousePressed", at(0.5), y, { button: "left", buttons: 1, clickCount });
      await browser.mouse("mouseReleased", at(0.5), y, { button: "left", clickCount });
    }
    assert.deepEqual([await sizeAt(0.02), await sizeAt(0.98)], whole);
  },

  async "a click on a name hides its line, a button changes the axis"(browser) {
    const before = await browser.page(colored, 0);
    const click = (selector) => document.querySelectorAll(selector)[1].click();
    await browser.page(click, ".u-legend .u-label");
    await browser.page(frame);
    assert.ok((await browser.page(colored, 0)) < before / 10);
    await browser.page(click, ".u-legend .u-label");
    await browser.page(() => document.querySelector("#sections button").click());
    await browser.page(frame);
    assert.ok((await browser.page(colored, 0)) > 100);
  },

  async "filters leave the rows of a codec and a type"(browser) {
    await browser.page(choose, [2, "linear8"]);
    const own = records.filter((row) => short(row.codec) === "linear8");
    assert.equal(await browser.page(() => location.hash), "#codec=linear8");
    const count = (selector) => document.querySelectorAll(selector).length;
    const rows = () => document.querySelectorAll("details tr + tr").length;
    assert.equal(await browser.page(rows), own.length);
    const names = (await browser.page(legendOf, 0)).slice(1).map(([name]) => name);
    assert.ok(names.length > 0 && names.every((name) => /^(linear8|NCCL)/.test(name)), names.join());
    const type = own.at(-1).type;
    await browser.page(choose, [1, type]);
    const both = own.filter((row) => row.type === type);
    assert.equal(await browser.page(rows), both.length);
    assert.equal(await browser.page(count, "h2"), 1);
    const kept = address + (await browser.page(() => location.hash));
    await browser.page(choose, [1, ""]);
    await browser.page(choose, [2, ""]);
    assert.equal(await browser.page(rows), records.length);
    await browser.visit(kept);
    assert.equal(await browser.page(rows), both.length, "the address keeps the choice");
  },

  async "no script fails, nothing is loaded from elsewhere"(browser) {
    const bad = browser.events.filter(({ method, params }) =>
      method === "Runtime.exceptionThrown"
      || (method === "Runtime.consoleAPICalled" && ["error", "assert", "warning"].includes(params.type))
      || (method === "Log.entryAdded" && params.entry.level === "error"));
    assert.deepEqual(bad, []);
    const requests = browser.events.filter(({ method }) => method === "Network.requestWillBeSent");
    const urls = requests.map(({ params }) => params.request.url.split("#")[0]);
    assert.ok(urls.length > 0 && urls.every((url) => url === address || url === "about:blank"), urls.join());
  },
};

async function main() {
  const browser = new Browser();
  let failed = false;
  try {
    await browser.open();
    await browser.visit(address);
    for (const [name, check] of Object.entries(checks)) {
      try {
        await check(browser);
        console.log("ok: Chromium: " + name);
      } catch (error) {
        failed = true;
        console.log(error.stack);
        console.log("FAILED: Chromium: " + name);
      }
    }
  } finally {
    await browser.close();
  }
  process.exitCode = failed ? 1 : 0;
}

main().catch((error) => {
  console.log(error.stack);
  console.log("FAILED: Chromium");
  process.exitCode = 1;
});
