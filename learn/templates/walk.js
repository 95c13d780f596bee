"use strict";
// Plays recordings: it shows recorded values, and computes only which step comes next.
const byId = (id) => document.getElementById(id);
const settings = JSON.parse(byId("settings").textContent);
const OF_QUERIES = new Set(["Q", "O", "l", "m", "lse", "dO", "dQ", "D"]);
let recordings = {}, recording = null, step = 0, timer = null;

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

// The state after a step: every change up to it.
function stateAt(n) {
  const state = { fast: {}, slow: {}, changed: new Set(), tiles: [], steps: recording.steps[n] };
  for (let s = 0; s <= n; s++) {
    const now = recording.steps[s];
    Object.assign(state.fast, now.fast);
    Object.assign(state.slow, now.slow);
    if (s < n && now.i && now.j && recording.source[now.line].includes("s = ")) state.tiles.push([now.i, now.j]);
  }
  for (const kind of ["fast", "slow"]) Object.keys(state.steps[kind] || {}).forEach((name) => state.changed.add(kind + name));
  return state;
}

function matrix(name, rows, mark, classes) {
  const table = document.createElement("table");
  table.className = ["matrix", ...classes].join(" ");
  table.dataset.name = name;
  table.createCaption().textContent = `${name}  ${rows.length}×${rows[0].length}`;
  rows.forEach((row, r) => {
    const line = table.insertRow();
    line.className = mark(r);
    row.forEach((value) => (line.insertCell().textContent = value));
  });
  return table;
}

const inside = (r, range) => range && r >= range[0] && r < range[1];

function show(n) {
  step = Math.max(0, Math.min(n, recording.steps.length - 1));
  const state = stateAt(step), now = state.steps;
  byId("slider").value = step;
  byId("counter").textContent = `${step + 1} of ${recording.steps.length}`;
  byId("source").replaceChildren(...recording.source.map((text, line) => {
    const span = document.createElement("span");
    span.textContent = text || " ";
    span.style.setProperty("--indent", text.length - text.trimStart().length);
    if (line === now.line) span.className = "now";
    return span;
  }));
  const moved = (now.moves || []).map(([name, from, to, kind]) => `${kind}s ${name}[${from}:${to}]`);
  byId("line").textContent = recording.source[now.line].trim();
  byId("why").textContent = recording.why[now.line] + (moved.length ? `  →  ${moved.join(", ")}` : "");
  const fast = Object.entries(state.fast), idle = new Set(now.idle), changed = (name) => (state.changed.has(name) ? ["changed"] : []);
  byId("fast").replaceChildren(...fast.map(([name, rows]) => matrix(name, rows, () => "", idle.has(name) ? ["idle"] : changed("fast" + name))));
  byId("slow").replaceChildren(...Object.entries(state.slow).map(([name, rows]) => matrix(name, rows, (r) => {
    const move = (now.moves || []).filter((m) => m[0] === name && inside(r, [m[1], m[2]])).pop();
    return move ? move[3] : inside(r, OF_QUERIES.has(name) ? now.i : now.j) ? "tile" : "";
  }, changed("slow" + name))));
  const count = (tensors) => tensors.reduce((sum, [, rows]) => sum + rows.length * rows[0].length, 0);
  const unused = count(fast.filter(([name]) => idle.has(name)));
  byId("held").textContent = `${count(fast)} numbers` + (unused ? `, ${unused} of them not needed any more (pale)` : "");
  byId("moved").textContent = `${settings.bytes * now.read} bytes read, ${settings.bytes * now.written} written`;
  drawMap(state, now);
  history.replaceState(null, "", "#" + new URLSearchParams({ ...chosen(), step }));
}

function drawMap(state, now) {
  const table = document.createElement("table");
  recording.visible.forEach((row, i) => {
    const line = table.insertRow();
    row.forEach((seen, j) => {
      const cell = line.insertCell(), classes = [];
      if (!seen) classes.push("hidden");
      else if (inside(i, now.i) && inside(j, now.j)) classes.push("now");
      else if (state.tiles.some(([rows, columns]) => inside(i, rows) && inside(j, columns))) classes.push("done");
      if (seen && !recording.kept[i][j]) classes.push("dropped");
      cell.className = classes.join(" ");
    });
  });
  byId("map").replaceChildren(table);
}

const chosen = () => Object.fromEntries(new FormData(byId("controls")));

function choose(first) {
  recording = recordings[settings.order.map((name) => chosen()[name]).join("|")];
  byId("sizes").textContent = `B_r = ${recording.B_r} rows of queries, B_c = ${recording.B_c} rows of keys`;
  byId("slider").max = recording.steps.length - 1;
  show(first);
}

function play(on) {
  clearInterval(timer);
  timer = on ? setInterval(() => (step + 1 < recording.steps.length ? show(step + 1) : play(false)), 700) : null;
  byId("play").textContent = on ? "❚❚" : "▶";
  byId("play").setAttribute("aria-label", on ? "Pause" : "Play");
}

const KEYS = {
  ArrowRight: () => show(step + 1), ArrowLeft: () => show(step - 1), Home: () => show(0),
  End: () => show(recording.steps.length - 1), " ": () => play(!timer),
};

async function start() {
  recordings = await unpack(byId("recordings").textContent);
  const asked = { ...settings.first, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };
  for (const select of byId("controls").querySelectorAll("select")) {
    select.value = asked[select.name];
    if (select.selectedIndex < 0) select.value = settings.first[select.name];
  }
  byId("controls").addEventListener("change", () => { play(false); choose(0); });
  byId("back").addEventListener("click", () => show(step - 1));
  byId("next").addEventListener("click", () => show(step + 1));
  byId("play").addEventListener("click", () => play(!timer));
  byId("slider").addEventListener("input", (event) => show(Number(event.target.value)));
  document.addEventListener("keydown", (event) => {
    const act = KEYS[event.key], pressed = event.target.closest("button, summary") && event.key === " ";
    if (!act || pressed || event.target.closest("select, input") || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
  choose(Number(asked.step) || 0);
  document.body.dataset.ready = "yes";
}

start();
