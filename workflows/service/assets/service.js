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
  if (box.classList.contains("toast")) say.timer = setTimeout(() => { box.hidden = true; }, 15000);
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

function bar(share, failed = 0) {
  const made = element("div", { class: "progress" }, element("i"), element("i", { class: "bad" }));
  fill(made, share, failed);
  return made;
}

function fill(progress, share, failed = 0) {
  progress.children[0].style.width = `${100 * share}%`;
  if (progress.children[1]) progress.children[1].style.width = `${100 * failed}%`;
  progress.setAttribute("aria-valuenow", (100 * share).toFixed(0));
}

const badge = (run) => `badge ${run.state}${run.state === "finished" && run.status?.shards?.failed ? " partly" : ""}`;

// How far it is: [share from 0 to 1, share that failed, words] of the part that is at work.
function progressOf(run) {
  const samples = run.status?.samples ?? {};
  const training = run.training;
  if (run.state === "finished" && training?.step && samples.planned && !samples.failed)
    return [1, 0, `${samples.committed.toLocaleString("en")} samples, ${training.step.toLocaleString("en")} steps`];
  if (run.kind === "study" && run.trials?.planned && !(samples.planned && samples.committed < samples.planned))
    return [run.trials.done / run.trials.planned, 0, `${run.trials.done} of ${run.trials.planned} trials`];
  if (training?.total_steps && !(samples.planned && samples.committed < samples.planned))
    return [training.step / training.total_steps, 0, `step ${training.step.toLocaleString("en")} of ${training.total_steps.toLocaleString("en")}`];
  if (!samples.planned) return null;
  return [samples.committed / samples.planned, samples.failed / samples.planned,
    `${samples.committed.toLocaleString("en")} of ${samples.planned.toLocaleString("en")} samples`];
}

async function showRuns() {
  let answer;
  try { answer = await call("/api/runs?limit=500"); } catch (error) { say(error.message); return; }
  if (!answer) return;
  const rows = answer.runs.map((run) => {
    const how = progressOf(run);
    const rate = ["running", "stopping"].includes(run.state) && run.status?.rate_samples_per_s;
    return element("tr", {},
      element("td", {}, element("a", { href: `${root}/runs/${run.id}` }, run.id.replaceAll("~", " / ")),
        element("span", { class: "soft" }, [run.kind, run.mode].filter(Boolean).join(", "))),
      element("td", {}, element("span", { class: badge(run) }, run.state)),
      element("td", {}, ...(how ? [bar(how[0], how[1]), how[2]] : [])),
      element("td", { class: "n" }, rate ? `${number(rate)} / s` : ""),
      element("td", { class: "n" }, run.updated ? `${duration(Date.now() / 1000 - run.updated)} ago` : ""));
  });
  $("#runs tbody").replaceChildren(...rows);
  $("#runs").hidden = !rows.length;
  $("#none").hidden = rows.length > 0;
}

// ---- one run

function fact(name, text) {
  const place = $(`[data-fact=${name}]`);
  if (place && place.textContent !== text) place.textContent = text;
  const around = place?.closest(".tile") ?? (name === "why" ? place : null);
  if (around) around.hidden = text === "" || text === "–";
}

function showRun(run) {
  const status = run.status ?? {};
  const samples = status.samples ?? {};
  const training = run.training;
  const busy = ["starting", "running", "stopping", "waiting"].includes(run.state);
  const failed = status.shards?.failed ?? 0;
  const whole = samples.planned > 0 && samples.committed === samples.planned;
  $("[data-fact=state]").className = badge(run);
  fact("kind", [run.kind, run.mode].filter(Boolean).join(", "));
  fact("state", run.state);
  fact("why", run.why ?? "");
  const how = progressOf(run);
  document.title = `${busy && how ? `${(100 * how[0]).toFixed(0)} % · ` : ""}${run.id.replaceAll("~", " / ")} · exitwave`;

  const share = samples.planned ? samples.committed / samples.planned : 0;
  $("#samples").hidden = !samples.planned;
  if (samples.planned) fill($("#samples .progress"), share, samples.failed / samples.planned);
  fact("progress", samples.planned
    ? `${samples.committed.toLocaleString("en")} of ${samples.planned.toLocaleString("en")} samples (${(100 * share).toFixed(0)} %)`
      + (samples.failed ? `, ${samples.failed.toLocaleString("en")} failed` : "")
      + (busy && status.eta_s ? `, ${duration(status.eta_s)} left` : "") : "");
  $("#steps").hidden = !training?.total_steps;
  if (training?.total_steps) {
    fill($("#steps .progress"), training.step / training.total_steps);
    fact("training", `step ${training.step.toLocaleString("en")} of ${training.total_steps.toLocaleString("en")} of the training`);
  }
  fact("committed", samples.committed === undefined ? "" : samples.committed.toLocaleString("en"));
  fact("rate", number(status.rate_samples_per_s));
  fact("eta", busy && !whole ? duration(status.eta_s) : "");
  fact("failed", status.shards ? String(failed) : "");
  fact("step", training?.total_steps ? `${training.step} / ${training.total_steps}` : training ? String(training.step) : "");
  fact("loss", number(training?.loss));

  for (const button of document.querySelectorAll("[data-command]")) {
    const command = button.dataset.command;
    const stops = command === "drain" || command === "cancel";
    button.hidden = stops ? !busy : command === "retry" ? !failed : (busy && run.state !== "waiting") || run.state === "finished" || run.kind === "training";
    button.disabled = stops && run.state === "stopping" && command === "drain";
  }
  $("[data-report]").hidden = !run.report;
  const dashboard = $("[data-dashboard]");
  dashboard.hidden = !(status.dashboard && /^https?:\/\//.test(status.dashboard));
  if (!dashboard.hidden) dashboard.href = status.dashboard;
  showStages(Object.entries(status.stages ?? {}), busy);
  showCurve.last = [training?.curve ?? [], training?.validation ?? []];
  showCurve(...showCurve.last);
  showMetrics(run.metrics ?? {});
  showTrials(run.trials);
  if (failed !== showRun.failed) { showRun.failed = failed; showFailures(); }
  if ((status.shards?.committed ?? 0) !== showRun.committed) { showRun.committed = status.shards?.committed ?? 0; showNewest(); }
  if ($("#log").open) showLog();
}

function showStages(stages, busy) {
  const done = (how) => how === "done" || how.endsWith("report.html");
  const now = busy ? stages.findIndex(([, how]) => !done(how)) : -1;
  $("#stages").hidden = !stages.length;
  $("#stages").replaceChildren(...stages.map(([part, how], i) =>
    element("li", { class: done(how) ? "done" : i === now ? "now" : "", title: done(how) ? "done" : how }, part)));
}

function showCurve(points, dots) {
  const all = [...points, ...dots].filter(([, y]) => y > 0);
  $("#curve").hidden = all.length < 2;
  if (all.length < 2) return;
  const svg = $("#curve svg");
  const width = svg.clientWidth || 600, bottom = 190, left = 52;
  svg.setAttribute("viewBox", `0 0 ${width} 220`);
  const last = Math.max(...all.map(([x]) => x));
  const low = Math.log(Math.min(...all.map(([, y]) => y)));
  const high = Math.log(Math.max(...all.map(([, y]) => y))) + 1e-9;
  const y = (value) => 10 + ((bottom - 10) * (high - Math.log(value))) / (high - low);
  const at = ([step, value]) => [left + ((width - left - 8) * step) / last, y(value)];
  const make = (tag, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    return made;
  };
  const d = points.filter(([, y]) => y > 0).map((p, i) => `${i ? "L" : "M"}${at(p).map((v) => v.toFixed(1)).join(" ")}`).join("");
  const grid = [high, (low + high) / 2, low].flatMap((level) => [
    make("line", { x1: left, y1: y(Math.exp(level)), x2: width - 8, y2: y(Math.exp(level)) }),
    make("text", { x: left - 8, y: y(Math.exp(level)) + 4, "text-anchor": "end" }, number(Math.exp(level), 2))]);
  svg.replaceChildren(...grid, make("text", { x: width - 8, y: 212, "text-anchor": "end" }, `step ${last.toLocaleString("en")}`),
    make("text", { x: left, y: 212 }, "0"), make("path", { d }),
    ...dots.filter(([, y]) => y > 0).map((p) => make("circle", { cx: at(p)[0], cy: at(p)[1], r: 3 })));
}

// Trials of a study, rounds of an adaptive campaign: a table as the API gives it.
function showTrials(trials) {
  $("#trials").hidden = !trials?.rows?.length;
  if (!trials?.rows?.length) return;
  $("#trials h2").textContent = trials.title;
  const cell = (tag, value) => element(tag, typeof value === "number" ? { class: "n" } : {}, typeof value === "number" ? number(value) : String(value ?? ""));
  $("#trials thead").replaceChildren(element("tr", {}, ...trials.columns.map((name, i) =>
    element("th", typeof trials.rows[0][i] === "number" ? { class: "n" } : {}, name))));
  $("#trials tbody").replaceChildren(...trials.rows.map((row) => element("tr", {}, ...row.map((value) => cell("td", value)))));
}

function showMetrics(metrics) {
  const names = { model: "the network", idpc: "iDPC", com: "centre of mass", ptycho: "ptychography", mean: "mean image" };
  const rows = Object.entries(metrics).filter(([, m]) => m && typeof m === "object");
  $("#metrics").hidden = !rows.length;
  $("#metrics tbody").replaceChildren(...rows.map(([key, m]) => element("tr", {}, element("td", {}, names[key] ?? key),
    element("td", { class: "n" }, number(m.rmse_VA)),
    ...[m.r2, m.ssim].map((value) => element("td", { class: "n" }, value == null ? "–" : value.toFixed(3))))));
}

const runId = document.body.dataset.id;

const short = (text) => (text.length > 140 ? `${text.slice(0, 140)}…` : text);

async function showFailures() {
  const rows = await call(`/api/runs/${runId}/failures`).catch(() => []) ?? [];
  $("#failures").hidden = !rows.length;
  $("#failures .failures").replaceChildren(...rows.slice(0, 200).map((row) => element("details", {},
    element("summary", {}, element("b", {}, row.state), ` in ${row.task}: ${short(row.why ?? "")}`),
    element("p", {}, row.why ?? ""),
    element("p", { class: "soft note" }, [(row.structures ?? []).join(", "), `${row.attempts} attempts`,
      `host ${row.host || "unknown"}`, duration(row.seconds)].filter(Boolean).join(" · ")))));
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
  const button = $("button[type=submit]", form);
  button.disabled = true; // a second click is no second run
  say("");
  try {
    const { name, configuration, online, ranks } = form.elements;
    const body = JSON.stringify({ name: name.value, configuration: configuration.value, // what is left empty is not said
      ...(online.value && { online: online.value === "true" }), ...(ranks.value && { ranks: Number(ranks.value) }) });
    const run = await call("/api/runs", { method: "POST", body });
    if (run) location.href = `${root}/runs/${run.id}`;
  } catch (error) { say(error.message); showLine(error.message); $("#said").scrollIntoView({ block: "nearest" }); }
  button.disabled = false;
});
// `name.yaml:52:5: …`: that line is shown and marked.
function showLine(message) {
  const found = /^\S*\.yaml:(\d+):/.exec(message);
  const area = $("#configuration");
  if (!found) return;
  const lines = area.value.split("\n");
  const start = lines.slice(0, found[1] - 1).join("\n").length + (found[1] > 1 ? 1 : 0);
  area.focus({ preventScroll: true });
  area.setSelectionRange(start, start + (lines[found[1] - 1] ?? "").length);
  area.scrollTop = (area.scrollHeight * Math.max(0, found[1] - 6)) / lines.length;
}

let written = ""; // by the last template: what differs from it is a person's work
$("#template")?.addEventListener("change", async (event) => {
  const area = $("#configuration");
  if (area.value.trim() && area.value !== written && !confirm("Replace what you have written?")) { event.target.value = ""; return; }
  written = event.target.value ? await call(`/templates/${event.target.value}`) : "";
  area.value = written;
  if (!$("#name").value) $("#name").value = event.target.value;
});
addEventListener("resize", () => { if (showCurve.last) showCurve(...showCurve.last); });

if (document.body.dataset.page === "runs") { showRuns(); setInterval(showRuns, 2000); }
if (document.body.dataset.page === "run") watchRun();
