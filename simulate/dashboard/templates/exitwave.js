// Fetches the snapshot once a second and writes it into the page. All addresses are relative to the page's own, so it
// is right behind any proxy; text is set as text, never as HTML.
(() => {
  "use strict";
  const root = document.getElementById("exitwave");
  const at = (id) => document.getElementById(id);
  const base = location.pathname.replace(/\/+$/, "");
  const asked = new URLSearchParams(location.search).get("dataset");
  const address = base + "/status" + (asked ? "?dataset=" + encodeURIComponent(asked) : "");
  const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

  const seconds = (s) => {
    if (s == null) return "–";
    if (s < 10 && s !== Math.trunc(s)) return s < 0.1 ? (1000 * s).toPrecision(2) + " ms" : s.toFixed(1) + " s";
    s = Math.round(s);
    const two = (n) => String(n).padStart(2, "0");
    if (s < 60) return s + " s";
    if (s < 3600) return Math.trunc(s / 60) + " min " + two(s % 60) + " s";
    if (s < 48 * 3600) return Math.trunc(s / 3600) + " h " + two(Math.trunc((s % 3600) / 60)) + " min";
    return (s / 86400).toFixed(1) + " days";
  };
  const bytes = (n) => {
    if (n == null) return "–";
    let unit = 0;
    while (n >= 1000 && unit < 5) { n /= 1000; unit += 1; }
    return (unit ? Number(n.toPrecision(3)) : n) + " " + ["B", "kB", "MB", "GB", "TB", "PB"][unit];
  };
  const figure = (x) => (x == null ? "–" : Number(x.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 }));
  const shown = {
    seconds, bytes, figure, rate: figure,
    sum: (counts) => number.format(Object.values(counts).reduce((a, b) => a + b, 0)),
    count: (n) => (n == null ? "–" : number.format(n)),
  };

  const text = (node, value) => { if (node.textContent !== value) node.textContent = value; };
  const made = (tag, value, cls) => {
    const node = document.createElement(tag);
    node.textContent = value;
    if (cls) node.className = cls;
    return node;
  };

  const bars = (list, rows) => {
    const most = Math.max(...rows.map((r) => r.value), 1e-12);
    list.replaceChildren(...rows.map((r) => {
      const item = document.createElement("li");
      item.append(made("span", r.name), made("b", r.text));
      item.style.setProperty("--w", (100 * (r.share ?? r.value / most)).toFixed(1) + "%");
      if (r.lost) item.className = "ew-lost";
      return item;
    }));
  };

  const failures = (s) => {
    const rows = s.failures.map((f) => {
      const line = document.createElement("tr");
      const when = new Date(1000 * f.t).toLocaleTimeString("en-GB");
      const why = f.why + (f.structures.length ? " (" + f.structures.join(", ") + ")" : "");
      const state = f.state + (f.final ? "" : ", tried again");
      line.append(made("td", when), made("td", f.task), made("td", state, f.final ? "ew-final" : ""), made("td", why), made("td", f.host || "–"));
      return line;
    });
    at("ew-failures").tBodies[0].replaceChildren(...rows);
    at("ew-failures").hidden = rows.length === 0;
    at("ew-nofailure").hidden = rows.length > 0;
    const classes = Object.entries(s.failed_attempts).filter(([, n]) => n).map(([name, n]) => n + " " + name);
    text(at("ew-classes"), classes.join(", "));
  };

  const cache = (s) => {
    at("ew-cache-card").hidden = !s.cache && !s.stage;
    const rows = [];
    if (s.stage && s.stage.total) rows.push({ name: "staged", text: bytes(s.stage.bytes) + " of " + bytes(s.stage.total), share: s.stage.bytes / s.stage.total, value: 1 });
    if (s.cache && s.cache.capacity) rows.push({ name: "in use", text: bytes(s.cache.used) + " of " + bytes(s.cache.capacity), share: s.cache.used / s.cache.capacity, value: 1 });
    bars(at("ew-cache"), rows);
    const c = s.cache || {};
    const more = [["ready", "shards ready"], ["copied", "copied"], ["evicted", "evicted"], ["hits", "hits"], ["misses", "misses"], ["waits", "waits"]];
    text(at("ew-cache-more"), more.filter(([k]) => c[k] != null).map(([k, word]) => number.format(c[k]) + " " + word).join(", "));
  };

  const show = (s) => {
    const age = Math.max(0, Date.now() / 1000 - s.updated);
    const silent = s.activity === "running" && age > 15;
    root.dataset.activity = silent ? "silent" : s.activity;
    text(at("ew-name"), s.name || "campaign");
    text(at("ew-where"), [s.dataset, s.cluster].filter(Boolean).join("  ·  "));
    const words = { running: "running", finished: s.shards.failed ? "finished with failures" : "finished", interrupted: "interrupted", "not started": "not started" };
    text(at("ew-activity"), silent ? "no word from the controller" : words[s.activity] || s.activity);
    text(at("ew-age"), (s.ended ? "ended " + seconds(Math.round(Date.now() / 1000 - s.ended)) : "updated " + seconds(Math.round(age))) + " ago");
    const note = silent ? "Nothing was heard from the controller for " + seconds(Math.round(age)) + "; these numbers are the last." : s.activity === "interrupted" ? s.why : "";
    at("ew-note").hidden = !note;
    text(at("ew-note"), note);
    for (const node of root.querySelectorAll("[data-key]")) {
      const value = node.dataset.key.split(".").reduce((part, key) => (part == null ? null : part[key]), s);
      const plain = value === 0 && node.dataset.key === "trainer.total_steps" ? null : value;
      text(node, plain == null ? "–" : shown[node.dataset.as || "count"](plain));
      node.dataset.value = JSON.stringify(value ?? null);
    }
    const all = Object.values(s.shards).reduce((a, b) => a + b, 0) || 1;
    for (const part of at("ew-bar").children) part.style.width = (100 * s.shards[part.dataset.state]) / all + "%";
    at("ew-bar").title = ((100 * s.shards.committed) / all).toFixed(1) + " % committed";
    bars(at("ew-slowest"), s.slowest.map((r) => ({ name: r.structure, value: r.seconds_per_sample, text: figure(r.seconds_per_sample) + " s" })));
    const time = { simulate: "in the simulator", write: "around it: drawing, checksums, writing", lost: "attempts that failed" };
    const sum = Object.values(s.seconds).reduce((a, b) => a + b, 0) || 1;
    bars(at("ew-time"), Object.entries(s.seconds).map(([k, v]) => ({ name: time[k] || k, value: v, share: v / sum, lost: k === "lost", text: seconds(v) + ", " + Math.round((100 * v) / sum) + " %" })));
    failures(s);
    at("ew-rejected-card").hidden = s.rejected.length === 0;
    at("ew-rejected").replaceChildren(...s.rejected.map((r) => made("li", r.source + ": " + r.why)));
    cache(s);
    at("ew-trainer-card").hidden = !s.trainer;
    if (s.trainer) {
      const held = s.trainer.eval ? "; " + s.trainer.eval.split + " loss " + figure(s.trainer.eval.loss) + " at step " + s.trainer.eval.step : "";
      text(at("ew-trainer-state"), s.trainer.state + ", " + s.trainer.ranks + " rank" + (s.trainer.ranks === 1 ? "" : "s") + held);
    }
    text(at("ew-newest"), s.newest ? s.newest.structures.join(", ") : "");
    const others = s.campaigns.filter((c) => c.dataset !== s.dataset);
    at("ew-others").replaceChildren(...others.flatMap((c) => {
      const link = made("a", c.name || c.dataset);
      link.href = base + "?dataset=" + encodeURIComponent(c.dataset);
      return [document.createTextNode(" · "), link];
    }));
    root.dataset.updated = s.updated;
  };

  const nothing = () => {
    root.dataset.activity = "none";
    text(at("ew-name"), "No campaign yet");
    text(at("ew-where"), "`exitwave simulate CAMPAIGN.yaml --out DATASET --cluster …` on this scheduler shows here.");
    text(at("ew-activity"), "waiting");
    text(at("ew-age"), "");
  };

  at("ew-json").href = address;
  const tab = document.querySelector('#myTopnav a[href="exitwave"]');
  if (tab) tab.closest("li").classList.add("active");

  const tick = async () => {
    try {
      const answer = await fetch(address, { cache: "no-store", signal: AbortSignal.timeout(10000) });
      if (!answer.ok && answer.status !== 404) throw new Error(answer.status);
      const s = await answer.json();
      if (s.shards) show(s); else nothing();
    } catch (error) {
      at("ew-note").hidden = false;
      text(at("ew-note"), "The scheduler does not answer; the numbers are the last that came.");
      root.dataset.activity = "silent";
    }
    setTimeout(tick, document.hidden ? 5000 : 1000);
  };
  tick();
})();
