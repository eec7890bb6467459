// Draws what the planner saw and wanted: the document's "plan", as the log of plans has it.
const drawPlanner = (() => {
  const { legend, state, number, timeText, duration } = fleet;
  const { byId, svgChild, makePanel, drawScale, drawLine, fillLegend, roundUp } = panels;
  const COUNTS_PX = 90, FIGURE_PX = 56, GAP_PX = 4;
  const STATES = ["ready", "starting", "draining"];
  const OUTCOMES = { ready: legend.plan.ready, failed: legend.states.suspect, expired: legend.states.suspect };
  const lastBefore = (rows, at) => rows.filter((row) => row[0] <= at).pop();
  // Rows of the span that is shown, and one more on both sides.
  const rowsOf = (rows, shown) => rows.filter((row, place) => (
    (place + 1 >= rows.length || rows[place + 1][0] >= shown.from) && (!place || rows[place - 1][0] <= shown.to)
  ));

  // Points of a line that keeps its value until the next row, and after the last one until now.
  const stepsAfter = (rows, value) => rows.flatMap((row, place) => (
    [[row[0], value(row)], [place + 1 < rows.length ? rows[place + 1][0] : state.now, value(row)]]
  ));

  // Points of a line whose value is that of the time since the row before.
  const stepsBefore = (rows, value) => rows.flatMap((row, place) => (
    place ? [[rows[place - 1][0], value(row)], [row[0], value(row)]] : []
  ));

  function drawFleet(place, shown, plans, counts) {
    const total = ([, ...row]) => row[0] + row[1] + row[2];
    const most = roundUp(Math.max(1, ...counts.map(total), ...plans.map((row) => row[1])));
    const panel = makePanel(place, COUNTS_PX, shown, (at) => {
      const count = lastBefore(counts, at), plan = lastBefore(plans, at);
      if (!count) return [];
      const planned = plan ? [`planned: ${plan[1]}`] : [];
      return [timeText(at), ...planned, ...STATES.map((name, column) => `${name}: ${count[column + 1]}`)];
    });
    counts.forEach((row, index) => {
      const x = panel.x(row[0]), end = panel.x(index + 1 < counts.length ? counts[index + 1][0] : state.now);
      let floor = COUNTS_PX;
      STATES.forEach((name, column) => {
        const height = (row[column + 1] / most) * (COUNTS_PX - 2);
        floor -= height;
        const box = { x, width: end - x, y: floor, height, fill: legend.plan[name], "shape-rendering": "crispEdges" };
        if (height && end > x) svgChild(panel.svg, "rect", box);
      });
    });
    const line = { class: "plain", stroke: legend.plan.planned };
    drawLine(panel, 0, COUNTS_PX, most, stepsAfter(plans, (row) => row[1]), line);
    drawScale(panel, 0, COUNTS_PX, most, ["fleet", "instances"]);
  }

  function drawFigure(place, shown, plans, name) {
    const of = (key) => (row) => row[2][name]?.[key] ?? null;
    const values = plans.flatMap((row) => [of("load")(row), of("forecast")(row)]);
    const most = roundUp(Math.max(0, ...values) || 1);
    const panel = makePanel(place, FIGURE_PX, shown, (at) => {
      const plan = lastBefore(plans, at), next = plans.find((row) => row[0] > at);
      const expected = plan && of("forecast")(plan), load = next && of("load")(next);
      const lines = [["expected", expected], ["it was", load]].filter(([, value]) => value !== null && value !== undefined);
      const texts = lines.map(([text, value]) => `${text}: ${number(value)} (${legend.figures[name]})`);
      return texts.length ? [timeText(at), ...texts] : [];
    });
    for (const [key, steps, dashes] of [["load", stepsBefore, "none"], ["forecast", stepsAfter, "4 2"]]) {
      const line = { class: "plain", stroke: legend.plan[key], "stroke-dasharray": dashes };
      drawLine(panel, 0, FIGURE_PX, most, steps(plans, of(key)), line);
    }
    drawScale(panel, 0, FIGURE_PX, most, ["load", legend.figures[name]]);
  }

  function drawGpuHours(place, shown, counts) {
    const points = counts.map((row) => [row[0], row[4]]), most = roundUp(Math.max(...points.map(([, hours]) => hours)) || 1);
    const panel = makePanel(place, FIGURE_PX, shown, (at) => {
      const point = lastBefore(points, at);
      return point ? [timeText(at), `${number(point[1])} GPU-hours`] : [];
    });
    drawLine(panel, 0, FIGURE_PX, most, points, { class: "plain", stroke: legend.plan.ready });
    drawScale(panel, 0, FIGURE_PX, most, ["cost", "GPU-hours"]);
  }

  function drawStarts(place, shown, starts) {
    const most = roundUp(Math.max(0, ...starts.map(([ordered, ended]) => ended - ordered)) || 1);
    const panel = makePanel(place, FIGURE_PX, shown, (at) => (
      starts.filter(([ordered, ended]) => ordered <= at && at <= ended).flatMap(([ordered, ended, outcome]) => (
        [`ordered ${timeText(ordered)}: ${outcome} after ${duration(ended - ordered)}`]
      ))
    ));
    for (const [ordered, ended, outcome] of starts) {
      const stroke = OUTCOMES[outcome] || legend.states.suspect;
      drawLine(panel, 0, FIGURE_PX, most, [[ordered, 0], [ended, ended - ordered]], { class: "plain", stroke });
    }
    drawScale(panel, 0, FIGURE_PX, most, ["starts", "seconds"]);
  }

  return (place, shown) => {
    const plan = state.plan;
    byId("planner-part").hidden = !plan;
    if (!plan) return;
    const plans = rowsOf(plan.plans, shown), counts = rowsOf(plan.fleet, shown);
    const starts = plan.starts.filter(([ordered, ended]) => ended >= shown.from && ordered <= shown.to);
    const expects = plan.plans.some((row) => Object.values(row[2]).some((values) => values.forecast !== null));
    const names = ["planned", ...STATES, "load", ...(expects ? ["forecast"] : [])];
    fillLegend(byId("plan-legend"), names.map((name) => [name, legend.plan[name]]));
    drawFleet(place, shown, plans, counts);
    for (const name of Object.keys(legend.figures)) {
      if (plan.plans.some((row) => row[2][name])) drawFigure(place, shown, plans, name);
    }
    if (counts.length) drawGpuHours(place, shown, counts);
    if (plan.starts.length) drawStarts(place, shown, starts);
  };
})();
