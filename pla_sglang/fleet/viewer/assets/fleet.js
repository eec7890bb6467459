"use strict";
// The data of the page and what can be asked of it. Of the document it reads the two JSON parts, and writes nothing.
const fleet = (() => {
  const readPart = (id) => JSON.parse(document.getElementById(id).textContent);
  const legend = readPart("legend-data");
  const recorded = readPart("data");
  const state = {
    life: null, now: 0, start: 0, head: {}, instances: [], samples: [], changes: [], moves: [], moved: 0, leftOut: 0,
    plan: null,
  };
  const places = {}; // name of a figure of load -> its place in a row
  let spans = new Map(); // index of instance -> where it belonged when

  function takeDocument(doc) {
    if (doc.life !== state.life) Object.assign(state, { life: doc.life, samples: [] });
    const last = lastSampleTime();
    doc.load_fields.forEach((name, place) => { places[name] = place + 1; });
    for (const [at, open, waiting, rows, lengths] of doc.samples) {
      if (at > last) state.samples.push({ at, open, waiting, lengths, loads: new Map(rows.map((row) => [row[0], row])) });
    }
    state.samples = state.samples.filter((sample) => sample.at >= doc.start_s);
    state.changes = doc.changes.map(([at, index, phase, role, cls, reason, epoch]) => (
      { at, index, state: phase, role, cls, reason, epoch }
    ));
    state.moves = doc.moves.map(([at, rid, source, target, how, reason, bytes, pause]) => (
      { at, rid, source, target, how, reason, bytes, pause }
    ));
    state.moved = doc.moved;
    state.plan = doc.plan ?? null;
    Object.assign(state, { now: doc.now_s, start: doc.start_s, head: doc.head });
    Object.assign(state, { instances: doc.instances, leftOut: doc.left_out });
    spans = new Map(state.instances.map((one) => [one.index, listSpans(one)]));
  }

  // 0 before the first one: times are above it.
  const lastSampleTime = () => (state.samples.length ? state.samples[state.samples.length - 1].at : 0);

  // When an instance belonged where: [{from, to, state, role, cls, reason, epoch}], in order, without gaps.
  function listSpans(instance) {
    const listed = [];
    if (instance.base) {
      const [phase, role, cls] = instance.base;
      listed.push({ from: state.start, state: phase, role, cls, reason: "" });
    }
    for (const change of state.changes) {
      if (change.index === instance.index) listed.push({ ...change, from: Math.max(change.at, state.start) });
    }
    listed.forEach((span, place) => {
      span.to = place + 1 < listed.length ? listed[place + 1].from : state.now;
    });
    return listed.filter((span) => span.state !== "dead");
  }

  const spansOf = (instance) => spans.get(instance.index);
  const spanAt = (index, at) => (spans.get(index) || []).find((span) => (
    span.from <= Math.min(at, state.now) && Math.min(at, state.now) <= span.to
  ));
  const poolOf = (span) => (span.state === "ready" ? span.role : span.state);
  const classOf = (span) => (span.state === "ready" && span.role !== "decode" ? span.cls || "both" : null);
  const hasClasses = () => [...spans.values()].some((listed) => listed.some((span) => span.cls));
  const figure = (row, name) => row[places[name]];
  const listPresent = (shown) => state.instances.filter((one) => (
    spansOf(one).some((span) => span.from < shown.to && span.to > shown.from)
  ));

  function countPools(at, poolAt) {
    const count = new Map();
    for (const one of state.instances) {
      const span = spanAt(one.index, at), pool = span && poolAt(span);
      if (pool) count.set(pool, (count.get(pool) || 0) + 1);
    }
    return count;
  }

  // Mean of a figure over the members of each pool that are sampled: Map of pool -> value.
  function meanByPool(sample, name) {
    const sums = new Map();
    for (const [index, row] of sample.loads) {
      const span = spanAt(index, sample.at);
      if (!span || span.state !== "ready") continue;
      const pool = span.cls ? `${span.role}, ${span.cls}` : span.role;
      const [sum, count] = sums.get(pool) || [0, 0];
      sums.set(pool, [sum + figure(row, name), count + 1]);
    }
    return new Map([...sums].map(([pool, [sum, count]]) => [pool, sum / count]));
  }

  // Samples of the span that is shown, two more on both sides.
  function samplesOf(shown) {
    const pad = 2 * (state.samples.length > 1 ? state.samples[1].at - state.samples[0].at : 1);
    return state.samples.filter((sample) => sample.at >= shown.from - pad && sample.at <= shown.to + pad);
  }

  const findNearest = (samples, at) => samples.reduce((best, one) => (
    !best || Math.abs(one.at - at) < Math.abs(best.at - at) ? one : best
  ), null);
  const changesOf = (shown) => state.changes.filter((one) => one.at >= shown.from && one.at <= shown.to);

  const movesOf = (shown) => state.moves.filter((one) => one.at >= shown.from && one.at <= shown.to);

  // -- words --------------------------------------------------------------------------------------------------------

  const words = (text) => text.replaceAll("_", " ");
  const explain = (reason) => (Object.hasOwn(legend.reasons, reason) ? legend.reasons[reason] : legend.unknown);
  const colourOf = (pool) => legend.roles[pool] || legend.states[pool] || legend.classes[pool] || "#888888";
  const duration = (s) => (s >= 90 ? `${(s / 60).toFixed(1)} min` : `${s.toFixed(s < 10 ? 1 : 0)} s`);

  function number(value) {
    if (value > 0 && value < 0.1) return `${Number(value.toPrecision(2))}`;
    if (value >= 1e6) return `${(value / 1e6).toFixed(2)}M`;
    return value >= 1e4 ? `${(value / 1e3).toFixed(1)}k` : `${Math.round(value * 100) / 100}`;
  }

  function timeText(at) {
    if (recorded) return `at ${duration(at - state.start)}`;
    return at >= state.now - 0.05 ? "now" : `${duration(state.now - at)} ago`;
  }

  const poolText = (span) => words(poolOf(span)) + (span.cls ? `, ${span.cls}` : "");

  function describeChange(change) {
    const epoch = change.epoch === null ? "" : ` (epoch ${change.epoch})`;
    const reason = change.reason ? `${change.reason}: ${explain(change.reason)}` : "without a reason";
    return ["", `${timeText(change.at)}: ${poolText(change)}${epoch}`, reason];
  }

  // What was the case at an instance at a time, and its changes not farther from it than near.
  function describeInstance(one, at, near, samples) {
    const span = spanAt(one.index, at), sample = findNearest(samples, at), row = sample && sample.loads.get(one.index);
    const lines = [one.name, `${timeText(at)}: ${span ? poolText(span) : "not there"}`];
    if (row) {
      const of = (name) => number(figure(row, name));
      lines.push(`${of("queued_tokens")} prompt tokens to compute, ${of("decode_tokens")} KV tokens decoding`);
      lines.push(`${of("requests")} requests, busy ${of("busy_percent")} %`);
      if (one.kv_capacity_tokens) lines.push(`KV ${of("kv_used_tokens")} of ${number(one.kv_capacity_tokens)} tokens`);
    }
    const close = state.changes.filter((each) => each.index === one.index && Math.abs(each.at - at) <= near);
    return lines.concat(...close.slice(-3).map(describeChange));
  }

  return {
    legend, recorded, state, takeDocument, lastSampleTime, spansOf, spanAt, poolOf, classOf, hasClasses, figure,
    listPresent, countPools, meanByPool, samplesOf, findNearest, changesOf, movesOf, words, explain, colourOf, duration, number,
    timeText, describeInstance,
  };
})();
