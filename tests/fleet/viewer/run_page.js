"use strict";
// Runs the script of a page against a stand-in of the document, and says what it has drawn. Of the DOM there is only what
// the page uses: whatever else it asks for is a TypeError here, and ends this process.
//
// stdin: {"page": html, "answers": [{"status", "body"}], "pointers": [{"panel", "x", "y"}]}
// stdout: {"asked": [...], "shown": [...]}: addresses that were asked, and what is shown after each answer, or after the
// load where there is none. A pointer stands at a share of the width and the height of a panel's drawing.
const fs = require("node:fs"), vm = require("node:vm");
const WIDTH_PX = 1000;

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], attributes: {}, listeners: {}, style: {}, clientWidth: WIDTH_PX });
    Object.assign(this, { className: "", hidden: false, value: "" });
  }

  set textContent(text) { this.children = [String(text)]; }
  get textContent() { return this.children.map((one) => one.textContent ?? one).join(""); }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  append(...parts) { this.children.push(...parts); }
  replaceChildren(...parts) { this.children = parts; }
  remove() { this.removed = true; }
  addEventListener(name, act) { this.listeners[name] = act; }
  getBoundingClientRect() { return { left: 0, top: 0 }; }
  all(tag) { return this.children.flatMap((one) => (one.tag ? [...(one.tag === tag ? [one] : []), ...one.all(tag)] : [])); }
}

// -- the page ----------------------------------------------------------------------------------------------------------

const given = JSON.parse(fs.readFileSync(0, "utf8"));
const byId = new Map();
for (const [, tag, before, id, after] of given.page.matchAll(/<([a-z0-9]+)\b([^>]*?)\bid="([^"]+)"([^>]*)>/g)) {
  const made = new Element(tag), value = /\bvalue="([^"]*)"/.exec(before + after);
  if (value) made.value = value[1];
  byId.set(id, made);
}
for (const [, id, text] of given.page.matchAll(/<script type="application\/json" id="([^"]+)">([\s\S]*?)<\/script>/g)) {
  byId.get(id).textContent = text;
}
const script = /<script>([\s\S]*?)<\/script>/.exec(given.page)[1];

const asked = [], answers = [...given.answers], timers = [], windowListeners = {};
const world = {
  document: {
    title: "",
    getElementById: (id) => byId.get(id) ?? null,
    createElement: (tag) => new Element(tag),
    createElementNS: (_, tag) => new Element(tag),
  },
  window: {
    innerWidth: WIDTH_PX,
    innerHeight: 800,
    addEventListener: (name, act) => { windowListeners[name] = act; },
    setTimeout: (act) => { timers.push(act); },
  },
  location: { pathname: "/pla/view" },
  fetch: async (address) => {
    asked.push(address);
    const { status, body } = answers.shift();
    return { ok: status === 200, status, json: async () => JSON.parse(JSON.stringify(body)) };
  },
};

// -- what is shown -----------------------------------------------------------------------------------------------------

const text = (id) => byId.get(id).textContent;
const rowsOf = (id) => byId.get(id).all("tr").map((row) => row.children.map((cell) => cell.textContent));

function describePanel(svg) {
  const of = (tag) => svg.all(tag).map((one) => one.attributes);
  return { rects: of("rect"), paths: of("path"), texts: svg.all("text").map((one) => one.textContent) };
}

function point({ panel, x, y }) {
  const [svg] = byId.get(panel).all("svg"), { width, height } = svg.attributes;
  svg.listeners.pointermove({ clientX: x * width, clientY: y * height });
  const lines = text("tip").split("\n");
  svg.listeners.pointerleave({});
  return byId.get("tip").hidden ? lines : ["the tip stays"];
}

function describePage() {
  windowListeners.resize(); // it draws the same again
  const facts = byId.get("facts").children.map((one) => one.children.map((part) => part.textContent));
  return {
    title: world.document.title, status: text("status"), span: text("span-text"), facts: Object.fromEntries(facts),
    legend: byId.get("legend").children.map((one) => one.textContent), pausable: !byId.get("pause").removed,
    tiles: byId.get("tiles").children.map((tile) => [
      ...tile.children.filter((one) => one.tag === "p").map((one) => one.textContent), tile.className.replace(/^tile ?/, ""),
      tile.all("path").length,
    ]),
    troubles: byId.get("troubles").hidden ? [] : byId.get("troubles").children.map((one) => one.textContent),
    panels: Object.fromEntries(["latency", "pools", "requests", "lengths", "planner", "loads", "rows"].map((id) => (
      [id, byId.get(id).all("svg").map(describePanel)]
    ))),
    tables: Object.fromEntries(["instances", "changes", "moves"].map((id) => [id, rowsOf(id)])),
    pointed: given.pointers.map(point),
  };
}

const settle = () => new Promise((done) => { setTimeout(done); });

(async () => {
  const shown = [];
  vm.runInNewContext(script, world, { filename: "page.js" });
  for (;;) {
    await settle();
    shown.push(describePage());
    if (!answers.length) break;
    timers.shift()();
  }
  process.stdout.write(JSON.stringify({ asked, shown }));
})();
