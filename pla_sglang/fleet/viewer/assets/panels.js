// Drawings with a time axis, and what stands in them. Texts become text nodes only: names come from outside.
const panels = (() => {
  const NAME_PX = 132, NARROW_PX = 70, AXIS_PX = 18;
  const STEPS_S = [0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400];
  const ROUND = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10];
  const { recorded, state, number, duration, clockText } = fleet;
  const byId = (id) => document.getElementById(id);

  function svgChild(parent, name, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  }

  // One drawing with a time axis below it; describe(at, y, near) gives the lines beside the mouse.
  function makePanel(place, height, shown, describe) {
    const width = Math.max(260, place.clientWidth), left = width < 600 ? NARROW_PX : NAME_PX;
    const svg = svgChild(place, "svg", { width, height: height + AXIS_PX, role: "img" });
    const scale = (width - left - 16) / Math.max(shown.to - shown.from, 1e-6);
    const x = (at) => left + (Math.min(Math.max(at, shown.from), shown.to) - shown.from) * scale;
    drawAxis(svg, height, shown, scale, x);
    const cursor = svgChild(svg, "line", { y1: 0, y2: height, class: "cursor", visibility: "hidden" });
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), px = event.clientX - box.left;
      const at = shown.from + (px - left) / scale, inside = px >= left - 4 && at <= shown.to + 4 / scale;
      const lines = inside ? describe(at, event.clientY - box.top, 6 / scale) : [];
      showTip(event, lines);
      cursor.setAttribute("visibility", lines.length ? "visible" : "hidden");
      cursor.setAttribute("x1", px);
      cursor.setAttribute("x2", px);
    });
    svg.addEventListener("pointerleave", (event) => {
      showTip(event, []);
      cursor.setAttribute("visibility", "hidden");
    });
    return { svg, x, left, width };
  }

  // Round times of the day, or without a clock, since the start or until now.
  function drawAxis(svg, height, shown, scale, x) {
    const hasClock = state.clock !== null, least = (s) => (hasClock && s >= 60 ? 50 : 75); // HH:MM needs less
    const step = STEPS_S.find((s) => s * scale > least(s)) || 86400;
    const start = recorded ? state.start : state.now, zero = hasClock ? -state.clock : start;
    for (let tick = Math.ceil((shown.from - zero) / step); zero + tick * step <= shown.to; tick++) {
      const at = x(zero + tick * step), ago = tick || recorded ? duration(Math.abs(tick * step)).replace(".0", "") : "now";
      const text = hasClock ? clockText(zero + tick * step + 1e-3).slice(0, step < 60 ? 8 : 5) : ago;
      svgChild(svg, "line", { x1: at, x2: at, y1: 0, y2: height, class: "grid" });
      const isLast = at > x(shown.to) - 10; // half of it would be outside
      svgChild(svg, "text", { x: at, y: height + 13, "text-anchor": isLast ? "end" : "middle" }, text);
    }
    if (hasClock) svgChild(svg, "text", { x: 0, y: height + 13 }, "UTC");
  }

  // The end of a scale: the next round number.
  function roundUp(value) {
    const power = 10 ** Math.floor(Math.log10(value)), found = ROUND.find((one) => one * power >= value * (1 - 1e-9));
    return Number((found * power).toPrecision(3));
  }

  function showTip(event, lines) {
    const tip = byId("tip"), { clientX, clientY } = event, { innerWidth, innerHeight } = window;
    const right = clientX > innerWidth / 2, low = clientY > innerHeight * 0.6;
    tip.hidden = !lines.length;
    tip.textContent = lines.join("\n");
    tip.style.left = right ? "" : `${clientX + 14}px`;
    tip.style.right = right ? `${innerWidth - clientX + 14}px` : "";
    tip.style.top = low ? "" : `${clientY + 14}px`;
    tip.style.bottom = low ? `${innerHeight - clientY + 14}px` : "";
  }

  // ``title``: what it is, and its unit. A count has no tick between two whole numbers.
  function drawScale(panel, top, height, most, [title, unit]) {
    const { svg, left, width } = panel, end = { x: left - 6, "text-anchor": "end" };
    const isNarrow = left < NAME_PX, middle = top + height / 2;
    const half = !isNarrow && (unit !== "instances" || most % 2 === 0) ? [most / 2] : [];
    for (const value of [0, ...half, most]) {
      const y = top + height - (value / most) * (height - 2);
      svgChild(svg, "text", { ...end, y: Math.max(top + 10, y + (value ? 4 : 0)) }, number(value));
      svgChild(svg, "line", { x1: left, x2: width, y1: y, y2: y, class: "grid" });
    }
    svgChild(svg, "text", { x: 0, y: isNarrow ? middle - 2 : top + 12, class: "name" }, title);
    svgChild(svg, "text", { x: 0, y: isNarrow ? middle + 11 : top + 26 }, unit);
  }

  // points: [time, value]; a value of null interrupts the line.
  function drawLine(panel, top, height, most, points, attributes) {
    let text = "", pen = "M";
    points.forEach(([at, value], place) => {
      const y = top + height - (value / most) * (height - 2), alone = pen === "M" && (points[place + 1] ?? [])[1] == null;
      if (value !== null) text += `${pen}${panel.x(at).toFixed(1)},${y.toFixed(1)}${alone ? "h0.1" : ""}`;
      pen = value === null ? "M" : "L";
    });
    if (text) svgChild(panel.svg, "path", { d: text, ...attributes });
  }

  // items: [text, colour]
  function fillLegend(place, items) {
    place.replaceChildren(...items.map(([text, fill]) => {
      const item = document.createElement("span"), box = svgChild(item, "svg", { width: 12, height: 12 });
      svgChild(box, "rect", { width: 12, height: 12, rx: 2, fill });
      item.append(text);
      return item;
    }));
  }

  return { byId, NAME_PX, STEPS_S, svgChild, makePanel, drawScale, drawLine, fillLegend, roundUp };
})();
