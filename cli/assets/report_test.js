// Tests the script of a report; see scripts/test-report.
"use strict";
const assert = require("assert");
const fs = require("fs");
const vm = require("vm");

const html = fs.readFileSync(process.argv[2], "utf8");
const data = html.split('id="data">')[1].split("</script>")[0];
const script = html.slice(html.lastIndexOf("<script>") + 8, html.lastIndexOf("</script>"));

// An element that records its children. It knows what the script of the report uses.
class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], textContent: "", value: "" });
  }
  appendChild(child) {
    this.children.push(child);
    return child;
  }
  replaceChildren() {
    this.children = [];
  }
  all(tag) {
    return this.children.flatMap((child) => [...(child.tag === tag ? [child] : []), ...child.all(tag)]);
  }
}

// Runs the script with an address; returns its elements, the charts that it drew, and its functions.
function run(hash) {
  const elements = {};
  const charts = [];
  const names = html.matchAll(/ id="([a-z]+)"/g);
  for (const [, name] of names) elements[name] = new Element(name);
  elements.data.textContent = data;
  const context = {
    document: { getElementById: (name) => elements[name] || null, createElement: (tag) => new Element(tag) },
    location: { hash, pathname: "/report.html" },
    history: { replaceState: (_, __, address) => (context.location.hash = address) },
    uPlot: class {
      constructor(options, values) {
        charts.push({ options, values });
      }
      destroy() {}
    },
    URLSearchParams,
  };
  vm.createContext(context);
  vm.runInContext(script + ";this.functions = { filtered, choices, choiceOf, hashOf, sizeLabel };", context);
  return { elements, charts, context, ...context.functions };
}

const page = JSON.parse(data);
const plain = (value) => JSON.parse(JSON.stringify(value));
const all = run("");

// Without a choice, every section, panel, row and line is there.
assert.equal(all.elements.sections.all("h2").length, page.sections.length);
const panels = page.sections.flatMap((section) => section.panels);
assert.equal(all.charts.length, panels.length);
const rows = page.sections.reduce((sum, section) => sum + section.rows.length, 0);
assert.equal(all.elements.sections.all("tr").length, rows + page.sections.length);
assert.equal(all.elements.summary.all("tr").length, page.summary.lines.length + 1);
assert.ok(all.elements.totals.textContent.startsWith(page.summary.rows + " rows; "));
for (const { options, values } of all.charts) {
  assert.equal(options.series.length, values.length);
  for (const line of values) assert.equal(line.length, values[0].length);
}

// A codec leaves its own lines and those of other libraries.
const coded = all.filtered(page, { collective: "", dtype: "", codec: "linear8" });
assert.ok(coded.sections.length > 0);
for (const section of coded.sections) {
  assert.ok(section.rows.every((row) => row.codec === "linear8"));
  for (const panel of section.panels) {
    assert.ok(panel.lines.every((line) => line.codec === "linear8" || line.codec === null));
    assert.ok(panel.x.every((_, at) => panel.lines.some((line) => line.y[at] !== null)));
  }
}
assert.ok(coded.lines.every((line) => line.codec === "linear8"));
const before = page.sections[0].panels[0].lines.length;
assert.ok(coded.sections[0].panels[0].lines.length < before);

// A type leaves its sections; nothing passes a choice that no row has.
const choices = plain(all.choices(page));
assert.deepEqual(choices.collective, ["all_reduce"]);
assert.ok(choices.dtype.includes("bf16") && choices.codec.includes("raw"));
const typed = all.filtered(page, { collective: "", dtype: "bf16", codec: "" });
assert.ok(typed.sections.length > 0 && typed.sections.every((section) => section.dtype === "bf16"));
assert.equal(all.filtered(page, { collective: "gather", dtype: "", codec: "" }).sections.length, 0);

// The address keeps the choice, and a selection redraws the page.
const choice = { collective: "all_reduce", dtype: "", codec: "minmax4:block=64" };
assert.deepEqual(plain(all.choiceOf(all.hashOf(choice))), choice);
assert.equal(all.hashOf({ collective: "", dtype: "", codec: "" }), "");
const narrow = run("#dtype=bf16");
assert.equal(narrow.elements.sections.all("h2").length, typed.sections.length);
assert.equal(run("#dtype=none").elements.sections.all("h2").length, page.sections.length);
const selects = all.elements.filters.all("select");
assert.equal(selects.length, 3);
selects[2].value = "linear8";
selects[2].onchange();
assert.equal(all.context.location.hash, "#codec=linear8");
assert.equal(all.elements.summary.all("tr").length, coded.lines.length + 1);

for (const [size, label] of [[8, "8"], [1024, "1K"], [1536, "1.5K"], [2 ** 29, "512M"], [null, ""]]) {
  assert.equal(all.sizeLabel(size), label);
}
console.log("report: " + all.charts.length + " charts, filters and address are right");
