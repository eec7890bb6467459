// Draws the fleet, and asks the router for news. Texts become text nodes only: names come from outside.
(() => {
  const POLL_MS = 2000, ROW_PX = 48, BAND_PX = 14, LOAD_PX = 80, SHOWN_CHANGES = 40;
  const { legend, recorded, state, words, number, bytes, seconds, duration, timeText, figure, colourOf } = fleet;
  const { byId, NAME_PX, svgChild, makePanel, drawScale, drawLine, fillLegend, roundUp } = panels;
  let paused = false, follow = true, lastStatus = "";

  // The sliders choose it: the first one its length, on a logarithmic scale, the second one its end.
  function shownSpan() {
    const whole = Math.max(state.now - state.start, 1e-3);
    const least = Math.min(whole, Math.max(10, whole / 100));
    const length = least * (whole / least) ** (byId("span").value / 1000);
    const end = follow ? state.now : state.start + length + (whole - length) * (byId("end").value / 1000);
    return { from: Math.max(state.start, end - length), to: end };
  }

  // -- drawing ------------------------------------------------------------------------------------------------------

  // How many instances are in each pool, as steps on top of each other. Returns the pools.
  function drawCounts(panel, top, height, shown, title, poolAt) {
    const inside = state.changes.map((one) => one.at).filter((at) => at > shown.from && at < shown.to);
    const times = [...new Set([shown.from, shown.to, ...inside])].sort((a, b) => a - b);
    const counts = times.map((at) => fleet.countPools(at + 1e-6, poolAt));
    const known = [legend.roles, legend.states, legend.classes].flatMap(Object.keys);
    const pools = known.filter((pool) => counts.some((count) => count.get(pool)));
    const most = Math.max(1, ...counts.map((count) => [...count.values()].reduce((a, b) => a + b, 0)));
    const floor = times.map(() => 0);
    for (const pool of pools) {
      times.slice(0, -1).forEach((at, place) => {
        const size = ((counts[place].get(pool) || 0) / most) * (height - 2), x = panel.x(at);
        const box = { x, width: Math.max(0.5, panel.x(times[place + 1]) - x), height: size, fill: colourOf(pool) };
        if (size) svgChild(panel.svg, "rect", { ...box, y: top + height - floor[place] - size });
        floor[place] += size;
      });
    }
    drawScale(panel, top, height, most, [title, "instances"]);
    return pools;
  }

  function drawPools(place, shown) {
    const classes = fleet.hasClasses(), { poolOf, classOf } = fleet;
    const panel = makePanel(place, classes ? 150 : 90, shown, (at, y) => {
      const count = fleet.countPools(at, y > 98 ? classOf : poolOf);
      return [timeText(at), ...[...count].map(([pool, many]) => `${words(pool)}: ${many}`)];
    });
    const pools = drawCounts(panel, 0, 90, shown, "by role", poolOf);
    if (classes) pools.push(...drawCounts(panel, 104, 44, shown, "by length", classOf));
    fillLegend(byId("legend"), [...new Set(pools)].map((pool) => [words(pool), colourOf(pool)]));
  }

  function drawRequests(place, shown, samples) {
    const most = roundUp(Math.max(1, ...samples.map((one) => one.open)));
    const panel = makePanel(place, LOAD_PX, shown, (at) => {
      const one = fleet.findNearest(samples, at);
      return one ? [timeText(one.at), `open: ${one.open}`, `of these waiting in the router: ${one.waiting}`] : [];
    });
    for (const [name, stroke] of [["open", "#7f8fa6"], ["waiting", legend.states.suspect]]) {
      drawLine(panel, 0, LOAD_PX, most, samples.map((one) => [one.at, one[name]]), { class: "plain", stroke });
    }
    drawScale(panel, 0, LOAD_PX, most, ["open", "requests"]);
  }

  function drawLengths(place, shown, samples) {
    const known = samples.filter((one) => one.lengths);
    byId("lengths-part").hidden = !state.samples.some((one) => one.lengths);
    if (!known.length) return;
    const most = roundUp(Math.max(1, ...known.flatMap((one) => one.lengths)));
    const panel = makePanel(place, LOAD_PX, shown, (at) => {
      const one = fleet.findNearest(known, at), [error, constant] = one.lengths.map(number);
      return [timeText(one.at), `predicted: off by ${error} tokens`, `best constant: off by ${constant} tokens`];
    });
    for (const [column, stroke] of [[1, "#7f8fa6"], [0, legend.roles.prefill]]) {
      drawLine(panel, 0, LOAD_PX, most, known.map((one) => [one.at, one.lengths[column]]), { class: "plain", stroke });
    }
    drawScale(panel, 0, LOAD_PX, most, ["error", "tokens"]);
  }

  function drawLoads(place, shown, samples) {
    for (const [name, title] of [["queued_tokens", "to compute"], ["decode_tokens", "decoding"]]) {
      const means = samples.map((sample) => [sample.at, fleet.meanByPool(sample, name)]);
      const pools = [...new Set(means.flatMap(([, mean]) => [...mean.keys()]))].sort();
      const most = roundUp(Math.max(1, ...means.flatMap(([, mean]) => [...mean.values()])));
      const panel = makePanel(place, LOAD_PX, shown, (at) => {
        const one = fleet.findNearest(samples, at), mean = one ? [...fleet.meanByPool(one, name)] : [];
        const lines = mean.map(([pool, value]) => `${words(pool)}: ${number(value)} tokens each`);
        return lines.length ? [timeText(one.at), ...lines] : [];
      });
      for (const pool of pools) {
        const [role, cls] = pool.split(", "), dashes = cls === "long" ? { "stroke-dasharray": "6 3" } : {};
        const points = means.map(([at, mean]) => [at, mean.has(pool) ? mean.get(pool) : null]);
        drawLine(panel, 0, LOAD_PX, most, points, { class: "plain", stroke: colourOf(role), ...dashes });
      }
      drawScale(panel, 0, LOAD_PX, most, [title, "tokens"]);
    }
  }

  function drawRows(place, shown, samples) {
    const rows = listShown(shown), queued = (row) => figure(row, "queued_tokens");
    const most = Math.max(1, ...samples.flatMap((sample) => [...sample.loads.values()].map(queued)));
    const panel = makePanel(place, rows.length * ROW_PX, shown, (at, y, near) => {
      const one = rows[Math.floor(y / ROW_PX)];
      return one ? fleet.describeInstance(one, at, near, samples) : [];
    });
    rows.forEach((one, place) => {
      drawLoadOf(panel, place * ROW_PX + BAND_PX + 8, one, samples, most);
      drawBand(panel, place * ROW_PX, one, shown);
    });
  }

  function drawLoadOf(panel, top, one, samples, most) {
    const own = samples.map((sample) => [sample.at, sample.loads.get(one.index)]).filter(([, row]) => row);
    if (!own.length) return;
    const heights = own.map(([at, row]) => [at, figure(row, "queued_tokens")]);
    const area = [[own[0][0], 0], ...heights, [own[own.length - 1][0], 0]];
    drawLine(panel, top, 20, most, area, { class: "load" });
    if (!one.kv_capacity_tokens) return;
    const shares = own.map(([at, row]) => [at, Math.min(1, figure(row, "kv_used_tokens") / one.kv_capacity_tokens)]);
    drawLine(panel, top, 20, 1, shares, { class: "kv" });
  }

  function drawBand(panel, top, one, shown) {
    const chars = panel.left < NAME_PX ? 10 : 20;
    const name = one.name.length > chars ? `…${one.name.slice(1 - chars)}` : one.name;
    svgChild(panel.svg, "text", { x: 0, y: top + 13, class: "name" }, name);
    svgChild(panel.svg, "text", { x: 0, y: top + 28 }, one.kind);
    for (const span of fleet.spansOf(one)) {
      if (span.to < shown.from || span.from > shown.to) continue;
      const x = panel.x(span.from), width = Math.max(0.5, panel.x(span.to) - x);
      svgChild(panel.svg, "rect", { x, width, y: top + 2, height: BAND_PX, fill: colourOf(fleet.poolOf(span)) });
      if (!fleet.classOf(span) || !span.cls) continue;
      svgChild(panel.svg, "rect", { x, width, y: top + BAND_PX + 2, height: 4, fill: colourOf(span.cls) });
    }
    const loss = fleet.listTroubles(shown.to).find((trouble) => trouble.one === one && trouble.text === "lost");
    if (loss) {
      const x = panel.x(loss.since), width = Math.max(2, panel.x(shown.to) - x);
      svgChild(panel.svg, "rect", { x, width, y: top + 2, height: BAND_PX, class: "lost" });
      svgChild(panel.svg, "text", { x: x + 4, y: top + 13, class: "on-lost" }, width > 40 ? "lost" : "");
    }
    for (const change of fleet.changesOf(shown)) {
      if (change.index !== one.index) continue;
      svgChild(panel.svg, "path", { d: `M${panel.x(change.at) - 3.5},${top}h7l-3.5,6z`, class: "mark" });
    }
  }

  // -- tables and texts ---------------------------------------------------------------------------------------------

  // Those in some pool in the span, and those that are lost at its end.
  function listShown(shown) {
    const present = fleet.listPresent(shown);
    const lost = fleet.listTroubles(shown.to).filter(({ one, text }) => text === "lost" && !present.includes(one));
    return [...present, ...lost.map(({ one }) => one)].sort((a, b) => a.index - b.index);
  }

  // Without rows it says so.
  function fillTable(table, header, rows) {
    const shown = rows.length ? [header, ...rows] : [["none in this span"]];
    table.replaceChildren(...shown.map((cells, place) => {
      const row = document.createElement("tr");
      row.append(...cells.map((text, column) => {
        const cell = document.createElement(place || !rows.length ? "td" : "th");
        cell.textContent = text;
        if (header[column] === "what it means") cell.className = "text";
        if (header[column] === "state" && place) cell.className = STATE_KINDS[text.split(" ")[0]] ?? "";
        return cell;
      }));
      return row;
    }));
  }

  const STATE_KINDS = { ready: "good", starting: "fair", draining: "fair", drained: "fair", suspect: "bad", lost: "bad" };

  function describeRow(one, shown, inside) {
    const lost = fleet.listTroubles(shown.to).find((trouble) => trouble.one === one && trouble.text === "lost");
    const gone = { state: lost ? `lost ${timeText(lost.since)}` : "gone", role: "-", cls: "" };
    const alive = fleet.spanAt(one.index, shown.to), span = alive || gone;
    const own = inside.map((sample) => sample.loads.get(one.index)).filter(Boolean), last = own[own.length - 1];
    const change = (name) => (own.length > 1 ? figure(last, name) - figure(own[0], name) : 0);
    const requests = change("first_tokens"), known = alive && one.kind;
    const mean = (name) => (requests ? seconds(change(name) / requests / 1000) : "-");
    const now = (name) => (last && known ? number(figure(last, name)) : "-");
    const share = last && known && one.kv_capacity_tokens ? figure(last, "kv_used_tokens") / one.kv_capacity_tokens : null;
    const pool = known ? [words(span.role), span.cls || "both"] : ["-", "-"];
    const load = [now("queued_tokens"), now("requests"), share === null ? "-" : `${Math.round(100 * share)} %`];
    return [one.name, span.state, one.kind || "-", ...pool, ...load, number(requests), mean("ttft_ms"), mean("predicted_ttft_ms")];
  }

  function fillTables(shown, samples) {
    const inside = samples.filter((one) => one.at >= shown.from && one.at <= shown.to);
    const columns = ["tokens to compute", "requests", "KV in use", "first tokens", "TTFT", "predicted"];
    const rows = listShown(shown).map((one) => describeRow(one, shown, inside));
    fillTable(byId("instances"), ["instance", "state", "kind", "role", "prompts", ...columns], rows);
    const names = new Map(state.instances.map((one) => [one.index, one.name]));
    const changes = fleet.changesOf(shown).slice(-SHOWN_CHANGES).reverse().map((one) => [
      timeText(one.at), names.get(one.index), words(fleet.poolOf(one)), one.cls || "both", one.epoch ?? "-",
      one.reason || "-", one.reason ? fleet.explain(one.reason) : "",
    ]);
    const header = ["when", "instance", "became", "prompts", "order", "reason", "what it means"];
    fillTable(byId("changes"), header, changes);
    const moves = fleet.movesOf(shown).slice(-SHOWN_CHANGES).reverse().map((one) => [
      timeText(one.at), one.source, one.target, words(one.how), bytes(one.bytes), seconds(one.pause),
      one.reason, fleet.explain(one.reason), one.rid,
    ]);
    const titles = ["when", "from", "to", "how", "KV cache", "pause", "reason", "what it means", "request"];
    fillTable(byId("moves"), titles, moves);
  }

  function fillFacts() {
    const facts = { ...state.head };
    if (state.moved) facts["requests that moved"] = number(state.moved);
    if (state.leftOut) facts["not sampled"] = `${state.leftOut} further instances`;
    byId("facts").replaceChildren(...Object.entries(facts).map(([name, text]) => {
      const item = document.createElement("div"), term = document.createElement("dt");
      const value = document.createElement("dd");
      term.textContent = name;
      value.textContent = text;
      item.append(term, value);
      return item;
    }));
  }

  function drawAll() {
    const shown = shownSpan(), samples = fleet.samplesOf(shown);
    byId("span-text").textContent = duration(shown.to - shown.from);
    byId("end-text").textContent = timeText(shown.to);
    const parts = {
      pools: drawPools, requests: drawRequests, lengths: drawLengths, planner: drawPlanner, loads: drawLoads, rows: drawRows,
    };
    for (const [id, draw] of Object.entries(parts)) {
      byId(id).replaceChildren();
      draw(byId(id), shown, samples);
    }
    drawTiles(shown, samples);
    fillTables(shown, samples);
    fillFacts();
  }

  // -- the page -----------------------------------------------------------------------------------------------------

  function sayStatus(text, bad) {
    if (text !== lastStatus) byId("status").textContent = lastStatus = text;
    byId("status").className = bad ? "bad" : "";
  }

  async function poll() {
    const address = `${location.pathname.replace(/\/+$/, "")}/since/${fleet.lastSampleTime()}`;
    try {
      const answer = await fetch(address, { cache: "no-store" });
      if (!answer.ok) throw new Error(`the router answers ${answer.status}`);
      fleet.takeDocument(await answer.json());
      if (!paused) drawAll();
      const at = state.clock === null ? "" : `, ${timeText(state.now)}`;
      sayStatus(`${paused ? "paused" : "live"}${at}`, false);
    } catch (error) {
      sayStatus(`no new data: ${error.message}`, true);
    }
    window.setTimeout(poll, POLL_MS);
  }

  byId("span").addEventListener("input", drawAll);
  byId("end").addEventListener("input", () => {
    follow = Number(byId("end").value) >= 1000;
    drawAll();
  });
  byId("pause").addEventListener("click", () => {
    paused = !paused;
    byId("pause").textContent = paused ? "go on" : "pause";
    if (!paused) drawAll();
  });
  window.addEventListener("resize", drawAll);
  if (recorded) {
    byId("pause").remove();
    fleet.takeDocument(recorded);
    document.title = byId("title").textContent = recorded.title;
    const day = state.clock === null ? "" : ` from ${new Date(1000 * (state.start + state.clock)).toISOString().slice(0, 19).replace("T", " ")} UTC`;
    sayStatus(`recorded: ${duration(state.now - state.start)}${day}`, false);
    drawAll();
  } else {
    poll();
  }
})();
