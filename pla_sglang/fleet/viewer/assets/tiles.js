// The top row of the page, and its latency charts: whether targets are met, how fast, how many, and what has failed.
const drawTiles = (() => {
  const { recorded, state, number, seconds, percent, quantile, shareMet, clockText, timeText, duration } = fleet;
  const { byId, STEPS_S, svgChild, makePanel, drawScale, drawLine, roundUp } = panels;
  const LAST_S = 60, POINTS = 60, CURVE_PX = 34, CHART_PX = 70;
  const GOOD_SHARE = 0.99, FAIR_SHARE = 0.9, FEW_FAILED = 0.01;
  const FAR = 4; // a target so many times above all times is told, not drawn: they would lie on the axis
  const P50 = "#7f8fa6";

  // Figures of equal parts of a span that begin at multiples of their length, so that a curve moves without flicker.
  function listParts(samples, shown) {
    const gap = state.samples.length > 1 ? state.samples[1].at - state.samples[0].at : 0;
    const least = Math.max((shown.to - shown.from) / POINTS, gap), step = STEPS_S.find((s) => s >= least) || least;
    const parts = [];
    for (let from = Math.floor(shown.from / step) * step; from < shown.to; from += step) {
      parts.push({ at: Math.min(from + step / 2, shown.to), sum: fleet.sumFigures(samples, from, from + step) });
    }
    return parts;
  }

  const judgeShare = (share) => (share === null ? "" : share >= GOOD_SHARE ? "good" : share >= FAIR_SHARE ? "fair" : "bad");
  const judgeTime = (s, target) => (s === null || !target ? "" : s <= target ? "good" : s <= 2 * target ? "fair" : "bad");
  const judgeFailed = (share) => (share ? (share <= FEW_FAILED ? "fair" : "bad") : "good");

  function describeAttainment(title, name) {
    return {
      title: `${title} targets met`, points: (sum) => shareMet(sum[name]), low: (values) => Math.min(FAIR_SHARE, ...values),
      show: (sum) => {
        const [missed, met] = sum[name], share = shareMet(sum[name]);
        return [share === null ? "-" : percent(share), `${number(missed)} of ${number(missed + met)} missed`, judgeShare(share)];
      },
    };
  }

  function describeTail(title, name) {
    const target = () => state.targets[`${name}_s`];
    return {
      title: `P99 ${title}`, points: (sum) => quantile(sum[`${name}_buckets`], 0.99),
      show: (sum) => {
        const s = quantile(sum[`${name}_buckets`], 0.99);
        return [s === null ? "-" : seconds(s), target() ? `target ${seconds(target())}` : "", judgeTime(s, target())];
      },
    };
  }

  const TILES = [
    describeAttainment("TTFT", "ttft"), describeAttainment("TPOT", "tpot"), describeTail("TTFT", "ttft"),
    describeTail("TPOT", "tpot"),
    {
      title: "requests/s", points: (sum) => sum.ended / sum.covered,
      show: (sum) => [number(sum.ended / sum.covered), `${number(sum.output_tokens / sum.covered)} tokens/s`, ""],
    },
    {
      title: "errors", points: (sum) => (sum.ended ? sum.failed / sum.ended : 0),
      show: (sum) => {
        const share = sum.ended ? sum.failed / sum.ended : 0;
        return [sum.failed ? percent(share) : "0", `${number(sum.failed)} of ${number(sum.ended)} requests`, judgeFailed(share)];
      },
    },
  ];

  function addTile(place, { title, value, detail, kind }) {
    const tile = document.createElement("div");
    tile.className = `tile ${kind}`;
    for (const [text, name] of [[title, "title"], [value, "value"], [detail, "detail"]]) {
      const part = document.createElement("p");
      part.className = name;
      part.textContent = text;
      tile.append(part);
    }
    place.append(tile);
    return tile;
  }

  function drawCurve(tile, points, shown, low) {
    const values = points.map(([, value]) => value).filter((value) => value !== null);
    if (!values.length) return;
    const width = Math.max(80, tile.clientWidth - 24), floor = low ? low(values) : 0;
    const most = Math.max(...values, floor) - floor || 1, length = Math.max(shown.to - shown.from, 1e-6);
    const svg = svgChild(tile, "svg", { width, height: CURVE_PX, "aria-hidden": "true" });
    const panel = { svg, x: (at) => ((Math.min(Math.max(at, shown.from), shown.to) - shown.from) / length) * (width - 2) + 1 };
    const line = points.map(([at, value]) => [at, value === null ? null : value - floor]);
    drawLine(panel, 0, CURVE_PX - 1, most, line, { class: "curve" });
  }

  function addReady(place, shown) {
    const spans = state.instances.map((one) => fleet.spanAt(one.index, shown.to)).filter(Boolean);
    const counts = new Map();
    for (const { state: name } of spans) counts.set(name, (counts.get(name) || 0) + 1);
    const ready = counts.get("ready") || 0, troubles = fleet.listTroubles(shown.to);
    const lost = troubles.filter((one) => one.text === "lost").length;
    // Who follows a lost one at its address is not one more.
    const follows = spans.filter((span) => span.state === "starting").length;
    const all = spans.length + Math.max(0, lost - follows);
    const rest = [...counts].filter(([name]) => name !== "ready").map(([name, count]) => `${count} ${name}`);
    if (lost) rest.unshift(`${lost} lost`);
    const bad = troubles.some((one) => one.bad) || !ready;
    const kind = bad ? "bad" : ready < all ? "fair" : "good";
    const tile = addTile(place, { title: "instances ready", value: `${ready} of ${all}`, detail: rest.join(", "), kind });
    const inside = state.changes.map((one) => one.at).filter((at) => at > shown.from && at < shown.to);
    const times = [shown.from, ...inside.sort((a, b) => a - b), shown.to], steps = [];
    const count = (at) => state.instances.filter((one) => fleet.spanAt(one.index, at)?.state === "ready").length;
    times.slice(0, -1).forEach((at, index) => {
      const many = count(at + 1e-6);
      steps.push([at, many], [times[index + 1], many]);
    });
    return () => drawCurve(tile, steps, shown);
  }

  function drawChart(place, parts, shown, name, title) {
    const of = (share) => parts.map(({ at, sum }) => [at, sum && quantile(sum[`${name}_buckets`], share)]);
    const [half, tail] = [of(0.5), of(0.99)], target = state.targets[`${name}_s`];
    const values = tail.map(([, value]) => value).filter((value) => value !== null);
    if (!values.length) return;
    const isNear = target && target <= FAR * Math.max(...values), most = roundUp(Math.max(...values, isNear ? target : 0));
    const panel = makePanel(place, CHART_PX, shown, (at) => {
      const near = parts.reduce((best, one) => (!best || Math.abs(one.at - at) < Math.abs(best.at - at) ? one : best), null);
      const buckets = near && near.sum && near.sum[`${name}_buckets`], tail = buckets && quantile(buckets, 0.99);
      return tail ? [timeText(near.at), `P50 ${seconds(quantile(buckets, 0.5))}`, `P99 ${seconds(tail)}`] : [];
    });
    if (target && !isNear) {
      const text = `target ${seconds(target)}: above`;
      svgChild(panel.svg, "text", { x: panel.width - 4, y: 12, "text-anchor": "end" }, text);
    }
    if (isNear) {
      const line = { class: "plain target", "stroke-dasharray": "5 4" };
      drawLine(panel, 0, CHART_PX, most, [[shown.from, target], [shown.to, target]], line);
    }
    drawLine(panel, 0, CHART_PX, most, half, { class: "plain", stroke: P50 });
    drawLine(panel, 0, CHART_PX, most, tail, { class: "curve" });
    drawScale(panel, 0, CHART_PX, most, [title, "seconds"]);
  }

  function drawLatency(parts, shown) {
    const place = byId("latency");
    place.replaceChildren();
    byId("latency-part").hidden = !parts.some(({ sum }) => sum && sum.ended); // before it is drawn: it has no width else
    drawChart(place, parts, shown, "ttft", "TTFT");
    drawChart(place, parts, shown, "tpot", "TPOT");
  }

  function listTroubles(shown) {
    const items = fleet.listTroubles(shown.to).map(({ one, since, bad, text, reason }) => {
      const item = document.createElement("li"), at = state.clock === null ? timeText(since) : `${clockText(since)} UTC`;
      item.className = bad ? "bad" : "fair";
      const why = reason ? `: ${fleet.explain(reason)}` : "";
      item.textContent = `${one.name} ${text} since ${at} (${duration(shown.to - since)})${why}`;
      return item;
    });
    byId("troubles").hidden = !items.length;
    byId("troubles").replaceChildren(...items);
  }

  return (shown, samples) => {
    const place = byId("tiles"), parts = listParts(samples, shown);
    const from = recorded ? shown.from : Math.max(shown.from, shown.to - LAST_S);
    const sum = fleet.sumFigures(samples, from, shown.to + 1e-3);
    byId("tiles-span").textContent = `Figures are of the ${recorded ? "span that is shown" : `last ${duration(shown.to - from)}`}, curves of all that is shown.`;
    place.replaceChildren();
    const curves = [addReady(place, shown)]; // drawn once the tiles have their widths
    for (const { title, points, show, low } of TILES) {
      const [value, detail, kind] = sum ? show(sum) : ["-", recorded ? "not in this recording" : "no request yet", ""];
      const tile = addTile(place, { title, value, detail, kind });
      const line = parts.map(({ at, sum: part }) => [at, part ? points(part) : null]);
      curves.push(() => drawCurve(tile, line, shown, low));
    }
    curves.forEach((draw) => draw());
    listTroubles(shown);
    drawLatency(parts, shown);
  };
})();
