"use strict";
// The data of the page and what can be asked of it. Of the document it reads the two JSON parts, and writes nothing.
const fleet = (() => {
  const readPart = (id) => JSON.parse(document.getElementById(id).textContent);
  const legend = readPart("legend-data");
  const recorded = readPart("data");
  const state = {
    life: null, now: 0, start: 0, head: {}, instances: [], samples: [], changes: [], moves: [], moved: 0, leftOut: 0,
    plan: null, clock: null, targets: {},
  };
  const LONG_START_S = 60; // an instance that takes longer to be ready is shown as a trouble
  const places = {}; // name of a figure of load -> its place in a row
  let spans = new Map(); // index of instance -> where it belonged when

  function takeDocument(doc) {
    if (doc.life !== state.life) Object.assign(state, { life: doc.life, samples: [] });
    const last = lastSampleTime();
    doc.load_fields.forEach((name, place) => { places[name] = place + 1; });
    for (const [at, open, waiting, rows, lengths, values] of doc.samples) {
      const figures = values && Object.fromEntries(doc.figure_fields.map((name, place) => [name, values[place]]));
      const loads = new Map(rows.map((row) => [row[0], row]));
      if (at > last) state.samples.push({ at, open, waiting, lengths, figures, loads });
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
    Object.assign(state, { instances: doc.instances, leftOut: doc.left_out, perDoubling: doc.buckets_per_doubling });
    Object.assign(state, { clock: doc.clock_start_s ?? null, targets: doc.targets ?? {} });
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
  // Instances that are lost or not well at a time: [{one, since, bad, text, reason}], in order of the fleet.
  function listTroubles(at) {
    const found = [];
    for (const one of state.instances) {
      const span = spanAt(one.index, at), end = lossOf(one, at);
      if (end) found.push({ one, since: end.at, bad: true, text: "lost", reason: end.reason });
      else if (span && span.state === "suspect") {
        found.push({ one, since: span.from, bad: true, text: "suspect", reason: span.reason });
      } else if (span && span.state === "starting" && at - span.from > LONG_START_S) {
        found.push({ one, since: span.from, bad: false, text: "not ready", reason: span.reason });
      }
    }
    return found.filter(({ one, text }) => text !== "not ready" || !found.some((other) => (
      other.text === "lost" && other.one.name === one.name
    )));
  }

  // The change with which it was lost, if no other one has served at its address since: not one that was removed or drained.
  function lossOf(one, at) {
    const own = state.changes.filter((change) => change.index === one.index && change.at <= at);
    const end = own[own.length - 1], before = own.length > 1 ? own[own.length - 2].state : one.base && one.base[0];
    if (!end || end.state !== "dead" || end.reason === "worker.removed") return null;
    if (["draining", "drained", "dead"].includes(before)) return null; // it had finished
    const follows = state.instances.some((other) => other.index > one.index && other.name === one.name && hasServed(other, at));
    return follows ? null : end;
  }

  const hasServed = (one, at) => (one.base && one.base[0] !== "starting") || state.changes.some((change) => (
    change.index === one.index && change.state === "ready" && change.at <= at
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

  // What requests have done in a span, over its samples; null: nothing is known of them. ``covered``: seconds.
  function sumFigures(samples, from, to) {
    const inside = samples.filter((sample) => sample.figures && sample.at > from && sample.at <= to);
    if (!inside.length) return null;
    const gap = state.samples.length > 1 ? state.samples[1].at - state.samples[0].at : to - from;
    const sum = { ended: 0, failed: 0, output_tokens: 0, ttft: [0, 0], tpot: [0, 0], ttft_buckets: {}, tpot_buckets: {} };
    for (const { figures } of inside) {
      for (const name of ["ended", "failed", "output_tokens"]) sum[name] += figures[name];
      for (const name of ["ttft", "tpot"]) sum[name] = sum[name].map((count, place) => count + figures[name][place]);
      for (const name of ["ttft_buckets", "tpot_buckets"]) {
        for (const [bucket, count] of Object.entries(figures[name])) sum[name][bucket] = (sum[name][bucket] || 0) + count;
      }
    }
    return { ...sum, covered: Math.min(to - from, inside.length * gap) };
  }

  // Of durations in buckets, in seconds; null: there are none. In the middle of its bucket.
  function quantile(buckets, share) {
    const sorted = Object.entries(buckets).map(([bucket, count]) => [Number(bucket), count]).sort((a, b) => a[0] - b[0]);
    let left = share * sorted.reduce((sum, [, count]) => sum + count, 0);
    const found = sorted.find(([, count]) => (left -= count) <= 1e-9);
    return found ? 2 ** ((found[0] - 0.5) / state.perDoubling) : null;
  }

  const shareMet = ([missed, met]) => (missed + met ? met / (missed + met) : null);

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

  const WORDS = { mixed: "prefill + decode", pull: "KV transfer", redo: "recompute" };
  const words = (text) => (Object.hasOwn(WORDS, text) ? WORDS[text] : text.replaceAll("_", " "));
  const explain = (reason) => (Object.hasOwn(legend.reasons, reason) ? legend.reasons[reason] : legend.unknown);
  const colourOf = (pool) => legend.roles[pool] || legend.states[pool] || legend.classes[pool] || "#888888";
  function duration(s) {
    if (s < 120) return `${s.toFixed(s < 10 ? 1 : 0)} s`;
    const [big, small, unit, part] = s < 5400 ? [60, 1, "min", "s"] : [3600, 60, "h", "min"];
    const rest = Math.round((s % big) / small);
    return `${Math.floor(s / big)} ${unit}${rest ? ` ${rest} ${part}` : ""}`;
  }

  function number(value) {
    if (value >= 1e6) return `${(value / 1e6).toFixed(2)}M`;
    return value >= 100 ? Math.round(value).toLocaleString("en-US") : `${Number(value.toPrecision(3))}`;
  }

  function bytes(value) {
    const unit = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]].find(([, size]) => value >= size);
    return unit ? `${Number((value / unit[1]).toPrecision(3))} ${unit[0]}` : `${value} bytes`;
  }

  const seconds = (s) => (s < 1 ? `${Number((1000 * s).toPrecision(3))} ms` : `${Number(s.toPrecision(3))} s`);
  const percent = (share) => `${share === 1 ? 100 : Math.min(99.99, 100 * share).toPrecision(3)} %`;
  const clockText = (at) => new Date(1000 * (at + state.clock)).toISOString().slice(11, 19);

  function timeText(at) {
    if (state.clock !== null) return `${clockText(at)} UTC`;
    if (recorded) return `at ${duration(at - state.start)}`;
    return at >= state.now - 0.05 ? "now" : `${duration(state.now - at)} ago`;
  }

  const poolText = (span) => words(poolOf(span)) + (span.cls ? `, ${span.cls}` : "");

  function describeChange(change) {
    const epoch = change.epoch === null ? "" : ` (order ${change.epoch})`;
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
    listPresent, listTroubles, countPools, meanByPool, samplesOf, findNearest, changesOf, movesOf, sumFigures, quantile,
    shareMet, words, explain, colourOf, duration, number, bytes, seconds, percent, clockText, timeText, describeInstance,
  };
})();
