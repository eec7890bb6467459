"use strict";
(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const places = [...document.querySelectorAll(".figure")];
  const drawn = new Set();

  // Colours of the page for a figure: text, grid lines, boxes that appear beside the mouse.
  function themed(layout) {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(name).trim();
    const own = { ...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" };
    own.font = { ...layout.font, color: of("--text"), family: "system-ui, sans-serif", size: 13 };
    own.hoverlabel = { bgcolor: of("--box"), bordercolor: of("--line"), font: { color: of("--text") }, align: "left" };
    for (const name of Object.keys(layout)) {
      if (/^[xy]axis\d*$/.test(name)) {
        own[name] = { ...layout[name], gridcolor: of("--line"), zerolinecolor: of("--line"), linecolor: of("--line") };
      }
    }
    return own;
  }

  function draw(place) {
    const figure = figures[Number(place.dataset.figure)];
    const options = { responsive: true, displayModeBar: false };
    window.Plotly.react(place, figure.data, themed(figure.layout), options);
    drawn.add(place);
  }

  function drawAsSeen() {
    const watcher = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting && !drawn.has(entry.target)) draw(entry.target);
      }
    }, { rootMargin: "600px" });
    places.forEach((place) => watcher.observe(place));
    dark.addEventListener("change", () => drawn.forEach(draw));
    window.addEventListener("beforeprint", () => places.filter((place) => !drawn.has(place)).forEach(draw));
  }

  async function loadPlotly() {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  // The first number of a cell, or its text.
  function keyOf(row, column) {
    const text = row.cells[column].textContent.trim();
    const number = /^[-+]?[\d,]*\.?\d+(e[-+]?\d+)?/i.exec(text);
    return number ? Number(number[0].replaceAll(",", "")) : text;
  }

  function sortTable(table, column) {
    const head = table.tHead.rows[0].cells[column];
    const direction = head.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
    const sign = direction === "ascending" ? 1 : -1;
    const rows = [...table.tBodies[0].rows].map((row) => [keyOf(row, column), row]);
    rows.sort(([a], [b]) => {
      if (typeof a === "number" && typeof b === "number") return sign * (a - b);
      if (typeof a === typeof b) return sign * a.localeCompare(b);
      return typeof a === "number" ? -1 : 1; // what is no number stands last
    });
    for (const cell of table.tHead.rows[0].cells) cell.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", direction);
    table.tBodies[0].append(...rows.map(([, row]) => row));
  }

  for (const table of document.querySelectorAll("table")) {
    [...table.tHead.rows[0].cells].forEach((cell, column) => {
      cell.querySelector("button").addEventListener("click", () => sortTable(table, column));
    });
  }
  if (places.length) {
    loadPlotly().then(drawAsSeen).catch((error) => {
      places.forEach((place) => { place.textContent = `This browser cannot draw the figure: ${error}`; });
    });
  }
})();
