// The pages of exitwave's service: they show what the API says, live, and send commands. No library, no network but ours.
"use strict";

const root = document.body.dataset.root;
const csrf = document.querySelector("meta[name=csrf]")?.content ?? "";
const $ = (selector, within = document) => within.querySelector(selector);

function say(text) {
  const box = $("#said");
  box.textContent = text;
  box.hidden = !text;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { box.hidden = true; }, 15000);
}

async function call(path, options = {}) {
  const headers = { accept: "application/json", ...(options.body ? { "content-type": "application/json" } : {}) };
  if (options.method === "POST") headers["x-csrf-token"] = csrf;
  const answer = await fetch(root + path, { ...options, headers, credentials: "same-origin" });
  if (answer.status === 401) { location.href = root + "/login?next=" + encodeURIComponent(location.pathname); return null; }
  const text = await answer.text();
  let data = text;
  try { data = JSON.parse(text); } catch { /* plain text */ }
  if (!answer.ok) {
    const detail = data?.detail ?? text;
    throw new Error(typeof detail === "string" ? detail : detail.map((d) => `${(d.loc ?? []).join(".")}: ${d.msg}`).join("\n"));
  }
  return data;
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const number = (value, digits = 3) =>
  value === null || value === undefined ? "–" : Number(Number(value).toPrecision(digits)).toLocaleString("en");

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} d`;
}

// ---- the list

async function showRuns() {
  let answer;
  try { answer = await call("/api/runs?limit=500"); } catch (error) { say(error.message); return; }
  if (!answer) return;
  const rows = answer.runs.map((run) => {
    const samples = run.status?.samples ?? {};
    const share = samples.planned ? `${samples.committed} of ${samples.planned}` : "";
    const training = run.training?.total_steps ? `, step ${run.training.step} of ${run.training.total_steps}` : "";
    return element("tr", {},
      element("td", {}, element("a", { href: `${root}/runs/${run.id}` }, run.id.replaceAll("~", " / ")), element("br"),
        element("span", { class: "soft" }, run.kind)),
      element("td", {}, element("span", { class: `badge ${run.state}` }, run.state)),
      element("td", {}, share + training),
      element("td", {}, run.status?.rate_samples_per_s ? `${number(run.status.rate_samples_per_s)} / s` : ""),
      element("td", {}, run.updated ? `${duration(Date.now() / 1000 - run.updated)} ago` : ""));
  });
  $("#runs tbody").replaceChildren(...rows);
  $("#none").hidden = rows.length > 0;
}

// ---- one run

function fact(name, text) {
  const place = $(`[data-fact=${name}]`);
  if (place && place.textContent !== text) place.textContent = text;
}

function showRun(run) {
  const status = run.status ?? {};
  const samples = status.samples ?? {};
  const state = $("[data-fact=state]");
  state.className = `badge ${run.state}`;
  fact("kind", run.kind);
  fact("state", run.state);
  fact("why", run.why ?? "");
  const share = samples.planned ? (100 * samples.committed) / samples.planned : 0;
  $(".progress i").style.width = `${share}%`;
  $(".progress").setAttribute("aria-valuenow", share.toFixed(0));
  fact("progress", samples.planned
    ? `${samples.committed} of ${samples.planned} samples (${share.toFixed(0)} %)${status.eta_s ? `, ${duration(status.eta_s)} left` : ""}` : "");
  fact("committed", samples.committed === undefined ? "–" : samples.committed.toLocaleString("en"));
  fact("rate", number(status.rate_samples_per_s));
  fact("eta", duration(status.eta_s));
  fact("failed", String(status.shards?.failed ?? "–"));
  const training = run.training;
  fact("step", training?.total_steps ? `${training.step} / ${training.total_steps}` : training ? String(training.step) : "–");
  fact("loss", number(training?.loss));
  const busy = ["starting", "running", "stopping", "waiting"].includes(run.state);
  for (const button of document.querySelectorAll("[data-command]")) {
    const stops = ["drain", "cancel"].includes(button.dataset.command);
    button.disabled = stops ? !busy : run.state === "running" || run.state === "stopping";
    if (button.dataset.command === "retry") button.hidden = !status.shards?.failed;
  }
  $("[data-report]").hidden = !run.report;
  const dashboard = $("[data-dashboard]");
  dashboard.hidden = !(status.dashboard && /^https?:\/\//.test(status.dashboard));
  if (!dashboard.hidden) dashboard.href = status.dashboard;
  const stages = Object.entries(status.stages ?? {});
  $("#stages").hidden = !stages.length;
  $("#stages ol").replaceChildren(...stages.map(([part, how]) => element("li", {}, `${part}: ${how}`)));
  showCurve(training?.curve ?? [], training?.validation ?? []);
  showMetrics(run.metrics ?? {});
  if ((status.shards?.failed ?? 0) !== showRun.failed) { showRun.failed = status.shards?.failed ?? 0; showFailures(); }
  if ((status.shards?.committed ?? 0) !== showRun.committed) { showRun.committed = status.shards?.committed ?? 0; showNewest(); }
  if ($("#log").open) showLog();
}

function showCurve(points, dots) {
  const all = [...points, ...dots].filter(([, y]) => y > 0);
  $("#curve").hidden = all.length < 2;
  if (all.length < 2) return;
  const last = Math.max(...all.map(([x]) => x));
  const low = Math.log(Math.min(...all.map(([, y]) => y)));
  const high = Math.log(Math.max(...all.map(([, y]) => y))) + 1e-9;
  const at = ([x, y]) => [50 + (540 * x) / last, 10 + (180 * (high - Math.log(y))) / (high - low)];
  const svg = $("#curve svg");
  const make = (tag, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    return made;
  };
  const d = points.filter(([, y]) => y > 0).map((p, i) => `${i ? "L" : "M"}${at(p).map((v) => v.toFixed(1)).join(" ")}`).join("");
  svg.replaceChildren(
    make("line", { x1: 50, y1: 190, x2: 590, y2: 190 }),
    make("text", { x: 2, y: 18 }, number(Math.exp(high))), make("text", { x: 2, y: 190 }, number(Math.exp(low))),
    make("text", { x: 545, y: 210 }, `step ${last}`), make("path", { d }),
    ...dots.filter(([, y]) => y > 0).map((p) => make("circle", { cx: at(p)[0], cy: at(p)[1], r: 2.5 })));
}

function showMetrics(metrics) {
  const names = { model: "the network", idpc: "iDPC", com: "centre of mass", ptycho: "ptychography", mean: "mean image" };
  const rows = Object.entries(metrics).filter(([, m]) => m && typeof m === "object");
  $("#metrics").hidden = !rows.length;
  $("#metrics tbody").replaceChildren(...rows.map(([key, m]) => element("tr", {}, element("td", {}, names[key] ?? key),
    ...[m.rmse_VA, m.r2, m.ssim].map((value) => element("td", { class: "n" }, number(value))))));
}

const runId = document.body.dataset.id;

async function showFailures() {
  const rows = await call(`/api/runs/${runId}/failures`).catch(() => []) ?? [];
  $("#failures").hidden = !rows.length;
  $("#failures .failures").replaceChildren(...rows.slice(0, 200).map((row) => element("details", {},
    element("summary", {}, `${row.task}: ${row.state}`),
    element("p", {}, row.why ?? ""),
    element("p", { class: "soft" },
      `${(row.structures ?? []).join(", ")} · ${row.attempts} attempts · host ${row.host || "unknown"} · ${duration(row.seconds)}`))));
}

async function showNewest() {
  const found = await call(`/api/runs/${runId}/newest`).catch(() => ({})) ?? {};
  const pictures = found.pictures ?? [];
  $("#newest").hidden = !pictures.length;
  $("#newest .pictures").replaceChildren(...pictures.map((p) => element("figure", {},
    element("img", { src: p.src, alt: p.caption }), element("figcaption", {}, p.caption))));
}

async function showLog() {
  const text = await call(`/api/runs/${runId}/log`).catch((error) => error.message);
  $("#log pre").textContent = text || "Nothing: this run was not started by the service, or has said nothing.";
}

function watchRun() {
  const source = new EventSource(`${root}/api/runs/${runId}/events`);
  source.addEventListener("run", (event) => { showRun.seen = true; showRun(JSON.parse(event.data)); });
  source.addEventListener("gone", () => { source.close(); say("This run has been deleted."); });
  source.onerror = () => { // also when the session has ended: ask, and be sent to the login page
    call(`/api/runs/${runId}`).then((run) => run && showRun(run)).catch(() => {});
    if (source.readyState === EventSource.CLOSED) { setTimeout(watchRun, 3000); }
  };
}

for (const button of document.querySelectorAll("[data-command]")) {
  button.addEventListener("click", async () => {
    try {
      const run = await call(`/api/runs/${runId}/commands`, { method: "POST", body: JSON.stringify({ command: button.dataset.command }) });
      if (run) showRun(run);
    } catch (error) { say(error.message); }
  });
}
for (const button of document.querySelectorAll("[data-post]")) {
  button.addEventListener("click", async () => {
    await fetch(root + button.dataset.post, { method: "POST", headers: { "x-csrf-token": csrf } });
    location.href = root + "/login";
  });
}
$("#log")?.addEventListener("toggle", () => { if ($("#log").open) showLog(); });
$("#submission")?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const form = event.target;
  try {
    const body = JSON.stringify({ name: form.elements.name.value, configuration: form.elements.configuration.value });
    const run = await call("/api/runs", { method: "POST", body });
    if (run) location.href = `${root}/runs/${run.id}`;
  } catch (error) { say(error.message); }
});
$("#template")?.addEventListener("change", async (event) => {
  if (event.target.value) $("#configuration").value = await call(`/templates/${event.target.value}`);
});

if (document.body.dataset.page === "runs") { showRuns(); setInterval(showRuns, 2000); }
if (document.body.dataset.page === "run") watchRun();
