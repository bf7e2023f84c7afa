"use strict";
// Everything below comes from DATA and reaches the page as text nodes or numbers, never as markup.
const DATA = JSON.parse(document.getElementById("data").textContent);
const table = (name) =>
  DATA[name].rows.map((row) => Object.fromEntries(DATA[name].columns.map((c, i) => [c, row[i]])));

// ---- building elements -------------------------------------------------------------------------
function put(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value);
  }
  node.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== ""));
  return node;
}
const h = (tag, attributes, ...children) => put(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) =>
  put(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// ---- numbers in words --------------------------------------------------------------------------
function scaled(value, base, units) {
  if (value === null || value === undefined) return ["–", ""];
  let step = 0;
  let x = Math.abs(value);
  while (x >= base * 0.9995 && step < units.length - 1) { x /= base; step += 1; }
  const digits = x >= 99.95 || (step === 0 && Number.isInteger(x)) ? 0 : x >= 9.995 ? 1 : 2;
  return [(value < 0 ? "−" : "") + x.toFixed(digits), units[step]];
}
const inSeconds = (v) => (v === 0 ? ["0", "s"] : scaled(v === null ? v : v * 1e6, 1000, ["µs", "ms", "s"]));
const inBytes = (v) => scaled(v, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
const inFlops = (v) => scaled(v, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"]);
const words = (how) => (v) => (v === null || v === undefined ? "–" : how(v).join("\u202f").trim());
const time = words(inSeconds), bytes = words(inBytes), flops = words(inFlops);
const whole = (v) => (v === null ? "–" : String(v).replace(/\B(?=(\d{3})+$)/g, "\u2009"));
const percent = (x) => `${x >= 0 ? "+" : "−"}${(Math.abs(x) * 100).toFixed(Math.abs(x) < 0.0995 ? 1 : 0)}%`;
const plain = (name) => name.replace(/^stablehlo\./, "");

// ---- mesh axes, one colour each ------------------------------------------------------------------
const AXES = DATA.mesh.names;
const axisClass = (name) => `axis${AXES.indexOf(name) % 4}`;
const chip = (name) => h("span", { class: `chip ${axisClass(name)}` }, name);
const escaped = AXES.map((a) => a.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).sort((a, b) => b.length - a.length);
const AXIS_WORD = new RegExp(`(?<![\\w])(${escaped.join("|")})(?![\\w])`);
const withChips = (text) => text.split(AXIS_WORD).map((part, i) => (i % 2 ? chip(part) : part));

function dims(shape, sharding) {
  if (!shape.length) return h("span", { class: "dims" }, "scalar");
  return h("span", { class: "dims" }, shape.map((size, i) => [
    i ? h("span", { class: "x" }, "×") : null, String(size), (sharding[i] || []).map(chip)]));
}

function meshPicture() {
  const sizes = DATA.mesh.sizes;
  if (sizes.reduce((a, b) => a * b, 1) > 256) return null;
  const across = sizes[sizes.length - 1];
  const down = sizes.length > 1 ? sizes[sizes.length - 2] : 1;
  const blocks = sizes.slice(0, -2).reduce((a, b) => a * b, 1);
  const cell = across * blocks > 16 || down > 8 ? 12 : 22, gap = 4;
  const wide = across * (cell + gap), high = down * (cell + gap);
  const drawing = s("svg", { width: blocks * (wide + 12) + 4, height: high + 40, role: "img", "aria-label": "device mesh" });
  for (let b = 0; b < blocks; b += 1) for (let r = 0; r < down; r += 1) for (let c = 0; c < across; c += 1)
    drawing.append(s("rect", { x: b * (wide + 12) + c * (cell + gap), y: r * (cell + gap) + 20, width: cell,
      height: cell, rx: 4, style: "fill:var(--accent);fill-opacity:0.16;stroke:var(--accent);stroke-opacity:0.45" }));
  const last = AXES.length - 1;
  const label = (i) => `${AXES[i]} ${sizes[i]}`;
  drawing.append(s("text", { x: 0, y: 12, style: `fill:var(--axis${last % 4})` }, `${label(last)} →`));
  if (last > 0) drawing.append(s("text", { x: 0, y: high + 34, style: `fill:var(--axis${(last - 1) % 4})` },
    `${label(last - 1)} ↓`, last > 1 ? `  · ${AXES.slice(0, -2).map((_, i) => label(i)).join(" · ")} ⇉` : ""));
  const width = Math.max(blocks * (wide + 12), 150);
  drawing.setAttribute("width", width);
  return h("div", { class: "mesh" }, drawing);
}

// ---- tables that draw only the rows in view --------------------------------------------------------
function rowTable({ columns, rows, height = 420, sort = null, find = "filter" }) {
  const ROW = 30;
  let shown = rows;
  let order = sort;
  const body = h("tbody");
  const count = h("span", { class: "count" });
  const scroll = h("div", { class: "rows-scroll", style: `max-height:${height}px`, tabindex: 0, onscroll: () => draw(false) });
  let drawn = "";
  const key = (c, row) => (c.sort ? c.sort(row) : row[c.key]);
  const text = (row) => columns.map((c) => String(c.text ? c.text(row) : row[c.key])).join(" ").toLowerCase();
  const texts = new Map();
  function draw(force) {
    const first = Math.max(0, Math.floor(scroll.scrollTop / ROW) - 12);
    const end = Math.min(shown.length, first + Math.ceil(height / ROW) + 24);
    if (!force && drawn === `${first}:${end}`) return;
    drawn = `${first}:${end}`;
    const gap = (n) => h("tr", { class: "gap" }, h("td", { colspan: columns.length, style: `height:${n * ROW}px` }));
    body.replaceChildren(
      ...(first ? [gap(first)] : []),
      ...shown.slice(first, end).map((row) => h("tr", {}, columns.map((c) => {
        const content = c.show ? c.show(row) : String(row[c.key]);
        return h("td", { class: [c.num && "num", c.mono && "mono"].filter(Boolean).join(" ") || null,
          title: c.text ? c.text(row) : typeof content === "string" ? content : null }, content);
      }))),
      ...(end < shown.length ? [gap(shown.length - end)] : []));
  }
  function refresh() {
    const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    shown = rows.filter((row) => {
      if (!wanted.length) return true;
      if (!texts.has(row)) texts.set(row, text(row));
      return wanted.every((w) => texts.get(row).includes(w));
    });
    if (order) {
      const [name, sign] = order;
      const column = columns.find((c) => c.key === name);
      shown = [...shown].sort((a, b) => {
        const x = key(column, a), y = key(column, b);
        return sign * (x === y ? 0 : x === null ? -1 : y === null ? 1 : x < y ? -1 : 1);
      });
    }
    for (const [i, c] of columns.entries()) {
      const th = head.children[i];
      const active = order && order[0] === c.key;
      if (active) th.setAttribute("aria-sort", order[1] > 0 ? "ascending" : "descending");
      else th.removeAttribute("aria-sort");
      th.firstChild.textContent = c.label + (active ? (order[1] > 0 ? " ↑" : " ↓") : "");
    }
    count.textContent = shown.length === rows.length ? `${whole(rows.length)} rows` : `${whole(shown.length)} of ${whole(rows.length)} rows`;
    scroll.scrollTop = 0;
    draw(true);
  }
  const filter = h("input", { type: "search", placeholder: find, "aria-label": find, oninput: refresh });
  const head = h("tr", {}, columns.map((c) => h("th", { class: c.num ? "num" : null, style: `width:${c.width}` },
    h("button", { onclick: () => {
      order = [c.key, order && order[0] === c.key ? -order[1] : c.num ? -1 : 1];
      refresh();
    } }, c.label))));
  scroll.append(h("table", { style: "min-width:860px" }, h("thead", {}, head), body));
  refresh();
  return h("div", { class: "card" }, h("div", { class: "rows-head" }, filter, count), scroll);
}

// ---- sections ------------------------------------------------------------------------------------
const COMPARISON = table("comparison");
const PLANS = [...new Set(COMPARISON.map((r) => r.plan))];
const figure = (plan, name, key) => {
  const row = COMPARISON.find((r) => r.plan === plan && r.figure === name);
  return row ? row[key] : null;
};
const OPS = table("ops").map((o) => ({ ...o, total: o.compute_s + o.hbm_s + o.comm_s }));
const section = (id, short, title, lead, ...content) =>
  h("section", { id, "data-short": short }, h("h2", {}, title), h("p", { class: "lead" }, lead), ...content);

function header() {
  const devices = DATA.mesh.sizes.reduce((a, b) => a * b, 1);
  return h("header", {},
    h("div", {},
      h("p", { class: "kicker" }, `autoshard · ${DATA.date}`),
      h("h1", {}, DATA.title),
      h("p", { class: "about" }, `Sharded over ${devices} devices, `,
        AXES.map((a, i) => [i ? " × " : "", chip(a), ` ${DATA.mesh.sizes[i]}`]),
        `. ${DATA.machine}.`)),
    meshPicture());
}

function tiles() {
  const own = PLANS[0];
  const tile = (label, [value, unit], note) => h("div", { class: "tile" }, h("div", { class: "label" }, label),
    h("div", { class: "value" }, value, h("small", {}, unit)), h("div", { class: "note" }, note || "\u00a0"));
  const measured = figure(own, "measured", "step_s"), predicted = figure(own, "predicted", "step_s");
  const others = PLANS.slice(1).map((p) => figure(p, "measured", "step_s")).filter((v) => v !== null);
  const list = [];
  if (measured !== null) list.push(tile("Step, measured", inSeconds(measured),
    others.length ? `${(measured / Math.min(...others)).toFixed(2)}× the best hand-made plan` : ""));
  list.push(tile("Step, predicted", inSeconds(predicted), "by the cost model"));
  const compiledPeak = figure(own, "compiled", "peak_bytes");
  list.push(tile("Peak memory", inBytes(compiledPeak ?? figure(own, "predicted", "peak_bytes")),
    `per device, ${compiledPeak === null ? "predicted" : "compiled"}`));
  const compiledBytes = figure(own, "compiled", "collective_bytes");
  list.push(tile("Communication", inBytes(compiledBytes ?? figure(own, "predicted", "collective_bytes")),
    "per device and step"));
  const gap = DATA.solver.gap;
  list.push(tile("Solver gap", gap === null ? ["–", ""] : [(gap * 100).toFixed(gap && gap < 0.0995 ? 2 : 1).replace(/\.?0+$/, ""), "%"],
    DATA.planning_s === null ? "loaded plan" : `planned in ${time(DATA.planning_s)}`));
  return h("div", { class: "tiles" }, list);
}

function comparison() {
  if (!PLANS.length) return null;
  const steps = PLANS.map((p) => ({ plan: p, measured: figure(p, "measured", "step_s"), predicted: figure(p, "predicted", "step_s") }));
  const most = Math.max(...steps.flatMap((x) => [x.measured ?? 0, x.predicted ?? 0]), 1e-12);
  const bars = h("div", { class: "bars" }, [...steps]
    .sort((a, b) => (a.measured ?? a.predicted) - (b.measured ?? b.predicted))
    .map((x) => {
      const own = x.plan === PLANS[0];
      return [h("div", { class: own ? "name own" : "name" }, x.plan),
        h("div", { class: "track open" },
          x.measured === null ? null : h("i", { style: `width:${(100 * x.measured) / most}%;--c:var(${own ? "--accent" : "--bar"})` }),
          x.predicted === null ? null : h("span", { class: "tick", title: `predicted ${time(x.predicted)}`, style: `left:calc(${(100 * x.predicted) / most}% - 1px)` })),
        h("div", { class: "num" }, x.measured === null ? time(x.predicted) : time(x.measured))];
    }));
  const groups = [["Step time", "step_s", time], ["FLOPs", "flops", flops], ["Collective bytes", "collective_bytes", bytes], ["Peak memory", "peak_bytes", bytes]]
    .map(([label, key, how]) => ({ label, key, how,
      names: ["predicted", "compiled", "measured"].filter((f) => PLANS.some((p) => figure(p, f, key) !== null)) }))
    .filter((g) => g.names.length);
  const best = (g, f) => { // the lowest of a column, unless several plans share it
    const values = PLANS.map((p) => figure(p, f, g.key)).filter((v) => v !== null);
    const low = Math.min(...values);
    return values.filter((v) => v <= low * 1.001).length === 1 ? low : null;
  };
  const cells = (plan) => groups.flatMap((g) => g.names.map((f, i) => {
    const value = figure(plan, f, g.key);
    const base = i ? figure(plan, g.names[0], g.key) : null;
    return h("td", { class: `num${i ? "" : " first"}${value !== null && value === best(g, f) ? " best" : ""}` }, g.how(value),
      value !== null && base && plan === PLANS[0] ? h("small", {}, percent(value / base - 1)) : null);
  }));
  const grid = h("table", { class: "figures" },
    h("thead", {},
      h("tr", {}, h("th"), groups.map((g) => h("th", { colspan: g.names.length }, g.label))),
      h("tr", {}, h("th", {}, "Plan"), groups.flatMap((g) => g.names.map((f, i) => h("th", { class: i ? "num" : "num first" }, f))))),
    h("tbody", {}, PLANS.map((p, i) => h("tr", { class: i ? null : "own" }, h("td", {}, p), cells(p)))));
  return section("comparison", "Comparison", "Against hand-made plans",
    "Predicted is the cost model, compiled is what XLA's program contains, measured is a clock: all programs in turn, on the same devices. A hand-made plan fixes the shardings of arguments and results: predicted is the cheapest plan that keeps them, compiled and measured are plain jax.jit given these shardings. Small percentages are against the prediction; the lowest of a column is bold.",
    h("div", { class: "card pad" }, bars,
      h("div", { class: "legend", style: "margin-top:16px" },
        h("span", {}, h("i", { style: "--c:var(--bar)" }), "measured step"),
        h("span", {}, h("i", { style: "--c:var(--ink);width:2px;height:12px;vertical-align:-2px" }), "predicted step"))),
    h("div", { class: "card wide", style: "margin-top:14px" }, grid));
}

const PARTS = [["compute_s", "Compute", "--compute"], ["hbm_s", "Memory traffic", "--hbm"], ["comm_s", "Communication", "--comm"]];
function grouped(rows, label, value) {
  const groups = new Map();
  for (const row of rows) {
    const name = label(row);
    if (!groups.has(name)) groups.set(name, { name, rows: [] });
    groups.get(name).rows.push(row);
  }
  for (const g of groups.values()) g.total = g.rows.reduce((sum, r) => sum + value(r), 0);
  return [...groups.values()].sort((a, b) => b.total - a.total);
}

function costs() {
  const add = (rows, key) => rows.reduce((sum, r) => sum + r[key], 0);
  const groups = grouped(OPS, (o) => plain(o.name), (o) => o.total).filter((g) => g.total > 0);
  const top = groups.slice(0, 10);
  const rest = groups.slice(10).flatMap((g) => g.rows);
  if (rest.length) top.push({ name: `${groups.length - 10} other kinds`, rows: rest, total: rest.reduce((t, r) => t + r.total, 0) });
  const most = Math.max(...top.map((g) => g.total), 1e-12);
  const bars = h("div", { class: "bars", style: "margin-top:18px" }, top.map((g) => [
    h("div", { class: "name" }, g.name, h("small", {}, `  ${whole(g.rows.length)}`)),
    h("div", { class: "track" }, PARTS.map(([key, label, colour]) => {
      const value = add(g.rows, key);
      return value ? h("i", { title: `${label}: ${time(value)}`, style: `width:${(100 * value) / most}%;--c:var(${colour})` }) : null;
    })),
    h("div", { class: "num" }, time(g.total))]));
  const legend = h("div", { class: "legend" }, PARTS.map(([key, label, colour]) =>
    h("span", {}, h("i", { style: `--c:var(${colour})` }), label, h("b", {}, time(add(OPS, key))))));
  return section("cost", "Cost", "Where the time goes",
    "Predicted busy time of one device in one step, by kind of op (with how many there are), loops times their trips. Arithmetic and memory traffic overlap, so a step is shorter than the sum.",
    h("div", { class: "card pad" }, legend, bars), collectives());
}

function collectives() {
  const rows = table("collectives");
  if (!rows.length) return null;
  const groups = grouped(rows, (r) => `${r.kind}\u0000${r.axes}`, (r) => r.seconds ?? 0);
  const sum = (g, key) => g.rows.reduce((t, r) => t + (r[key] ?? 0), 0);
  return [h("h3", {}, "Collectives that the plan asks for"),
    h("div", { class: "card wide" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", {}, "Collective"), h("th", {}, "Over"), h("th", { class: "num" }, "Places"), h("th", { class: "num" }, "Runs per step"), h("th", { class: "num" }, "Bytes sent"), h("th", { class: "num" }, "Predicted time"))),
      h("tbody", {}, groups.map((g) => h("tr", {}, h("td", {}, g.rows[0].kind.replace(/_/g, "-")), h("td", {}, withChips(g.rows[0].axes)),
        h("td", { class: "num" }, whole(g.rows.length)), h("td", { class: "num" }, whole(sum(g, "trips"))), h("td", { class: "num" }, bytes(sum(g, "bytes"))), h("td", { class: "num" }, time(sum(g, "seconds")))))))),
    h("details", {}, h("summary", {}, `All ${whole(rows.length)} collectives`), rowTable({ rows, sort: ["seconds", -1], height: 330,
      columns: [{ key: "kind", label: "Kind", width: "16%", show: (r) => r.kind.replace(/_/g, "-") }, { key: "axes", label: "Over", width: "20%", show: (r) => withChips(r.axes), text: (r) => r.axes },
        { key: "bytes", label: "Bytes sent", num: true, width: "14%", show: (r) => bytes(r.bytes) }, { key: "trips", label: "Trips", num: true, width: "10%", show: (r) => whole(r.trips) },
        { key: "seconds", label: "Predicted", num: true, width: "13%", show: (r) => time(r.seconds) }, { key: "source", label: "Source", mono: true, width: "27%" }] }))];
}

function memory() {
  const rows = table("memory");
  if (!rows.length) return null;
  const W = 1064, H = 250, left = 62, right = 12, top = 26, bottom = 28;
  const limit = DATA.memory_limit_bytes;
  const peak = rows.reduce((a, b) => (b.bytes > a.bytes ? b : a));
  const most = Math.max(peak.bytes, limit ?? 0) * 1.06 || 1;
  const start = rows[0].time, end = Math.max(rows[rows.length - 1].time, start + 1);
  const x = (t) => left + ((W - left - right) * (t - start)) / (end - start);
  const y = (b) => H - bottom - ((H - top - bottom) * b) / most;
  const columns = new Map(); // the highest row of each pixel column: what is drawn never hides a peak
  for (const r of rows) {
    const c = Math.round(x(r.time));
    if (!columns.has(c) || columns.get(c).bytes < r.bytes) columns.set(c, r);
  }
  const steps = [...columns].sort((a, b) => a[0] - b[0]);
  let line = `M${steps[0][0]},${y(steps[0][1].bytes)}`;
  for (const [c, r] of steps.slice(1)) line += `H${c}V${y(r.bytes).toFixed(1)}`;
  line += `H${W - right}`;
  const unit = 1024 ** Math.floor(Math.log(Math.max(most, 1)) / Math.log(1024));
  const nice = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500].find((n) => most / (n * unit) <= 5) || 1000;
  const marks = [];
  for (let i = 0; i * nice * unit <= most; i += 1) marks.push(i * nice * unit);
  const cursor = s("line", { class: "cursor", y1: top, y2: H - bottom, x1: -9, x2: -9 });
  const idle = `Peak ${bytes(peak.bytes)} at op ${peak.time}: ${peak.label}`;
  const readout = h("div", { class: "readout" }, idle);
  const anchor = x(peak.time) > W * 0.75 ? "end" : "start";
  const chart = s("svg", { viewBox: `0 0 ${W} ${H}`, width: "100%", class: "memory", role: "img", "aria-label": "memory over time",
    onmousemove: (event) => {
      const box = chart.getBoundingClientRect();
      const t = start + ((((event.clientX - box.left) * W) / box.width - left) / (W - left - right)) * (end - start);
      let low = 0, high = rows.length - 1;
      while (low < high) { const mid = (low + high + 1) >> 1; if (rows[mid].time <= t) low = mid; else high = mid - 1; }
      cursor.setAttribute("x1", x(rows[low].time)); cursor.setAttribute("x2", x(rows[low].time));
      readout.textContent = `${bytes(rows[low].bytes)} at op ${rows[low].time}: ${rows[low].label}`;
    },
    onmouseleave: () => { readout.textContent = idle; cursor.setAttribute("x1", -9); cursor.setAttribute("x2", -9); } },
    marks.map((b) => [s("line", { class: "grid", x1: left, x2: W - right, y1: y(b), y2: y(b) }), s("text", { x: left - 10, y: y(b) + 4, "text-anchor": "end" }, b ? bytes(b) : "0")]),
    s("path", { class: "area", d: `${line}V${y(0)}H${steps[0][0]}Z` }), s("path", { class: "edge", d: line }),
    limit === null ? null : [s("line", { class: "limit", x1: left, x2: W - right, y1: y(limit), y2: y(limit) }), s("text", { x: W - right, y: y(limit) - 6, "text-anchor": "end", style: "fill:var(--axis2)" }, `limit ${bytes(limit)}`)],
    cursor, s("circle", { class: "peak", cx: x(peak.time), cy: y(peak.bytes), r: 4 }),
    s("text", { class: "strong", x: x(peak.time) + (anchor === "end" ? -8 : 8), y: y(peak.bytes) - 8, "text-anchor": anchor }, `peak ${bytes(peak.bytes)}`),
    s("text", { x: left, y: H - 8 }, "first op"), s("text", { x: W - right, y: H - 8, "text-anchor": "end" }, "last op"));
  return section("memory", "Memory", "Memory over time", "Predicted bytes in use on one device while the program runs, op by op. Move over the chart to see what is running.",
    h("div", { class: "card pad" }, chart, readout));
}

function timeline() {
  const rows = table("timeline");
  if (!rows.length) return null;
  const W = 1064, left = 110, right = 12, lane = 34, top = 6;
  const lanes = [...new Set(rows.flatMap((r) => r.streams))].sort((a, b) => (a !== "compute") - (b !== "compute") || (a < b ? -1 : 1));
  const H = top + lane * lanes.length + 26;
  const end = Math.max(...rows.map((r) => r.start_s + r.seconds));
  const x = (t) => left + ((W - left - right) * t) / end;
  const sends = (r) => r.kind !== "compute" && r.kind !== "loop";
  const idle = "Move over the chart to see what is running.";
  const readout = h("div", { class: "readout" }, idle);
  const boxes = [];
  for (const r of rows) {
    const width = x(r.start_s + r.seconds) - x(r.start_s);
    if (width < 0.3) continue; // too short to see
    const colour = sends(r) ? "--comm" : r.kind === "loop" ? "--axis2" : "--compute";
    for (const stream of r.streams) {
      const row = top + lane * lanes.indexOf(stream);
      const at = r.kind === "loop" ? { y: row + 2, height: 4 } : { y: row + 8, height: lane - 12 };
      boxes.push(s("rect", { x: x(r.start_s).toFixed(1), width: Math.max(width - 0.4, 0.3).toFixed(1), ...at, style: `fill:var(${colour})`,
        onmousemove: () => { readout.textContent = `${time(r.seconds)} from ${time(r.start_s)} on: ${r.name.replace(/_/g, "-")}${r.trips > 1 ? ` (${whole(r.trips)} times in a step)` : ""}${sends(r) && r.streams.includes("compute") ? "; the device waits" : ""}`; } }));
    }
  }
  const chart = s("svg", { viewBox: `0 0 ${W} ${H}`, width: "100%", class: "memory", role: "img", "aria-label": "schedule of a step", onmouseleave: () => { readout.textContent = idle; } },
    lanes.map((name, i) => [s("line", { class: "grid", x1: left, x2: W - right, y1: top + lane * (i + 1), y2: top + lane * (i + 1) }), s("text", { x: left - 10, y: top + lane * i + lane / 2 + 5, "text-anchor": "end" }, name)]),
    boxes, s("text", { x: left, y: H - 6 }, "0"), s("text", { x: W - right, y: H - 6, "text-anchor": "end" }, time(end)));
  const parts = h("div", { class: "legend" }, table("schedule").map((p) => h("span", {}, p.what, h("b", {}, time(p.seconds)))));
  return section("schedule", "Schedule", "What runs when",
    "Predicted schedule of one device in one step. A collective on the lane of compute keeps the device waiting; one beside it is hidden. Of a loop the first round is drawn, under a bar as long as all its rounds.",
    h("div", { class: "card pad" }, parts, chart, readout));
}

function parameters() {
  const rows = table("arguments").map((r) => ({ ...r, elements: r.shape.reduce((a, b) => a * b, 1),
    ways: r.sharding.flat().reduce((n, a) => n * DATA.mesh.sizes[AXES.indexOf(a)], 1) }));
  const text = (r) => r.shape.map((n, i) => [n, ...(r.sharding[i] || [])].join(" ")).join(" × ");
  return section("parameters", "Shardings", "Every argument and its sharding",
    "A chip after a size says which mesh axis splits that dimension; sizes are those of the whole array, bytes those of one device's piece.",
    rowTable({ rows, find: "filter arguments: name, type, axis", height: 440, columns: [
      { key: "path", label: "Argument", mono: true, width: "40%" }, { key: "dtype", label: "Type", mono: true, width: "9%" },
      { key: "elements", label: "Shape and sharding", width: "29%", show: (r) => dims(r.shape, r.sharding), text },
      { key: "ways", label: "Split", num: true, width: "9%", show: (r) => (r.ways === 1 ? "whole" : `${r.ways} ways`) },
      { key: "bytes", label: "Per device", num: true, width: "13%", show: (r) => bytes(r.bytes) }] }));
}

function graph() {
  const { nodes, edges, ops } = DATA.picture;
  if (!nodes.length) return null;
  const info = new Map(OPS.map((o) => [o.index, o]));
  const NW = 232, NH = 54, DX = 236, DY = 92, pad = 24;
  const px = (x) => pad + NW / 2 + x * DX, py = (layer) => pad + layer * DY;
  const width = Math.max(...nodes.map((n) => px(n[1])), ...edges.flatMap((e) => e.points.map((p) => px(p[0])))) + NW / 2 + pad;
  const height = Math.max(...nodes.map((n) => py(n[2]))) + NH + pad;
  const most = Math.max(...nodes.map((n) => info.get(n[0]).total), 1e-12);
  const cut = (t, n) => (t.length > n ? `${t.slice(0, n - 1)}…` : t);
  const lines = [], tags = [];
  for (const e of edges) {
    let d = "";
    e.points.forEach(([x, layer], i) => {
      const [cx, cy] = [px(x), py(layer)];
      if (i === 0) { d = `M${cx},${cy + NH}`; return; }
      const [fx, fl] = e.points[i - 1];
      const fy = py(fl) + NH;
      const mid = (fy + cy) / 2;
      d += `C${px(fx)},${mid} ${cx},${mid} ${cx},${cy}`;
      if (i < e.points.length - 1) d += `V${cy + NH}`;
    });
    lines.push(s("path", { d, class: e.reshard ? "reshard" : e.through ? "through" : null }));
    if (e.reshard) {
      const half = e.points.length / 2; // the label sits on the middle corner, or between two ends
      const [[ax, al], [bx, bl]] = [e.points[Math.ceil(half) - 1], e.points[Math.floor(half)]];
      const cx = (px(ax) + px(bx)) / 2, cy = (py(al) + py(bl) + NH) / 2;
      const label = cut(e.reshard, 34), w = label.length * 6.7 + 16;
      tags.push(s("g", { class: "tag" }, s("title", {}, `${e.reshard}, ${time(e.seconds)}`), s("rect", { x: cx - w / 2, y: cy - 9, width: w, height: 18, rx: 9 }), s("text", { x: cx, y: cy + 4 }, label)));
    }
  }
  const boxes = nodes.map(([index, x, layer, fetched]) => {
    const o = info.get(index);
    const [ox, oy] = [px(x) - NW / 2, py(layer)];
    let at = ox + 12;
    const parts = PARTS.map(([key, , colour]) => {
      const w = ((NW - 24) * o[key]) / most;
      const bar = w > 0.2 ? s("rect", { x: at, y: oy + NH - 9, width: w, height: 3.5, rx: 1.5, style: `fill:var(${colour})` }) : null;
      at += w;
      return bar;
    });
    if (fetched.length) {
      const label = cut([...new Set(fetched)].join(", "), 26), w = label.length * 6.7 + 16;
      tags.push(s("g", { class: "tag" }, s("title", {}, `arguments read: ${fetched.join("; ")}`),
        s("rect", { x: ox + NW - w + 8, y: oy + NH - 24, width: w, height: 18, rx: 9 }), s("text", { x: ox + NW + 8 - w / 2, y: oy + NH - 11 }, label)));
    }
    return s("g", {}, s("title", {}, `op ${index}: ${o.name}\n${o.source}\n${o.shapes}\n${o.sharding}\n${o.trips > 1 ? `${o.trips} trips\n` : ""}` + PARTS.map(([k, l]) => `${l} ${time(o[k])}`).join("\n")),
      s("rect", { class: "box", x: ox, y: oy, width: NW, height: NH, rx: 8 }),
      s("text", { class: "name", x: ox + 12, y: oy + 19 }, cut(plain(o.name), 20) + (o.trips > 1 ? ` ×${o.trips}` : "")),
      s("text", { class: "time", x: ox + NW - 12, y: oy + 19 }, time(o.total)),
      s("text", { class: "sub", x: ox + 12, y: oy + 36 }, cut(o.sharding || o.source, 31).split(AXIS_WORD)
        .map((part, i) => s("tspan", { style: i % 2 ? `fill:var(--${axisClass(part)})` : null }, part))), parts);
  });
  const drawing = s("svg", { width, height, viewBox: `0 0 ${width} ${height}` }, lines, boxes, tags);
  return section("graph", "Graph", "The graph",
    `The ${nodes.length} most expensive of ${whole(ops)} ops, in the order in which values flow. A line is a value; dotted ones pass through ops that are left out. Orange lines are reshards; an orange label on a box is the reshard of an argument that it reads. Point at an op for its source line.`,
    h("div", { class: "card graph" }, drawing));
}

function allOps() {
  const columns = [
    { key: "index", label: "#", num: true, width: "6%", show: (o) => whole(o.index) },
    { key: "name", label: "Op", width: "14%", show: (o) => plain(o.name) },
    { key: "source", label: "Source", mono: true, width: "15%" },
    { key: "shapes", label: "Result", mono: true, width: "15%" },
    { key: "sharding", label: "Sharding", width: "15%", show: (o) => withChips(o.sharding), text: (o) => o.sharding },
    { key: "trips", label: "Trips", num: true, width: "6%", show: (o) => whole(o.trips) },
    { key: "compute_s", label: "Compute", num: true, width: "9%", show: (o) => time(o.compute_s) },
    { key: "hbm_s", label: "Memory", num: true, width: "9%", show: (o) => time(o.hbm_s) },
    { key: "comm_s", label: "Comm.", num: true, width: "9%", show: (o) => time(o.comm_s) },
    { key: "bytes", label: "Bytes", num: true, width: "9%", show: (o) => bytes(o.bytes) }];
  const details = h("details", { id: "ops" }, h("summary", {}, `All ${whole(OPS.length)} ops`));
  details.addEventListener("toggle", () => details.append(rowTable({ rows: OPS, columns, height: 520, find: "filter ops: kind, file, axis" })), { once: true });
  return details;
}

const page = document.getElementById("page");
const sections = [comparison(), costs(), timeline(), memory(), parameters(), graph()].filter(Boolean);
if (sections.length) sections[sections.length - 1].append(allOps());
page.append(header(), h("nav", {}, sections.map((x) => h("a", { href: `#${x.id}` }, x.dataset.short))), tiles(), ...sections,
  h("footer", {}, `${DATA.solver.status} · ${DATA.versions.map(([n, v]) => `${n} ${v}`).join(" · ")}`));
