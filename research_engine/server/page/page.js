// Puts the page together: settings, the look of it, the list of models, and the state of the engine twice a second.

import { Chat } from "./chat.js";
import { getKey, request, setKey } from "./connection.js";
import { Timeline } from "./timeline.js";

const $ = (id) => document.getElementById(id);
const PARAMETERS = ["temperature", "top_p", "max_tokens", "seed"];
const KEPT = ["system", ...PARAMETERS];
const EVERY = 500; // ms between two looks at the engine
const RATE_OVER = 3; // seconds that tokens per second are a mean of

// settings

for (const name of KEPT) {
  $(name).value = localStorage.getItem(name) ?? "";
  $(name).addEventListener("change", () => localStorage.setItem(name, $(name).value));
}
$("key").value = getKey();
$("key").addEventListener("change", () => {
  setKey($("key").value);
  loadModels();
  look();
});

function settings() {
  const parameters = {};
  for (const name of PARAMETERS) {
    const value = $(name).valueAsNumber;
    if (!Number.isNaN(value)) parameters[name] = value;
  }
  return { model: $("model").value, system: $("system").value.trim(), parameters };
}

async function loadModels() {
  try {
    const { data } = await (await request("v1/models")).json();
    const chosen = $("model").value;
    $("model").replaceChildren(...data.map(({ id }) => new Option(id, id, false, id === chosen)));
  } catch (error) {
    show("down", error.message);
  }
}

// views and theme

for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => {
    document.body.dataset.tab = button.dataset.view;
    for (const other of document.querySelectorAll("nav button")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
  });
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
function setTheme() {
  const chosen = localStorage.getItem("theme") || (prefersDark.matches ? "dark" : "light");
  document.documentElement.dataset.theme = chosen;
  timeline.draw();
}
$("theme").addEventListener("click", () => {
  localStorage.setItem("theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  setTheme();
});
prefersDark.addEventListener("change", setTheme);

// the engine

const timeline = new Timeline($("timeline"), (step) => {
  picked = step;
  describe(step || last);
});
let last = null;
let picked = null;
let paused = false;
let seen = -1; // number of the latest step
let totals = []; // [seconds, prompt tokens, generated tokens] of the last looks

$("span").addEventListener("change", () => {
  timeline.span = Number($("span").value);
  timeline.draw();
});
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
});

function describe(step) {
  if (!step) return;
  const ms = ((step.finished - step.started) * 1000).toFixed(1);
  $("step").textContent =
    `Step ${step.step}: ${step.num_tokens} tokens (${step.num_prefill_tokens} prefill, ${step.num_decode_tokens} ` +
    `decode) of ${step.num_requests} ${step.num_requests === 1 ? "request" : "requests"} in ${ms} ms`;
}

function show(state, text) {
  document.body.dataset.state = state;
  if ($("status-text").textContent !== text) $("status-text").textContent = text;
}

function rates(now, prompt, generated) {
  totals.push([now, prompt, generated]);
  while (totals.length > 2 && now - totals[1][0] >= RATE_OVER) totals.shift();
  const [then, ...before] = totals[0];
  const seconds = now - then;
  return [prompt, generated].map((total, index) => (seconds > 0 ? (total - before[index]) / seconds : 0));
}

async function look() {
  try {
    const stats = await (await request(`stats?since=${seen}`)).json();
    const before = totals.at(-1);
    if (before && (stats.now < before[0] || stats.generation_tokens_total < before[2])) {
      // the server began anew, and so do its clock, its counts and the numbers of its steps
      timeline.clear();
      [totals, seen, stats.steps] = [[], -1, []];
    }
    const [prompt, generated] = rates(stats.now, stats.prompt_tokens_total, stats.generation_tokens_total);
    $("running").textContent = stats.running;
    $("waiting").textContent = stats.waiting;
    $("generation").textContent = Math.round(generated);
    $("prompt").textContent = Math.round(prompt);
    $("kv").textContent = `${(100 * stats.kv_utilization).toFixed(1)} %`;
    $("kv-meter").value = stats.kv_utilization;
    timeline.add(stats.steps);
    if (stats.steps.length) {
      last = stats.steps.at(-1);
      seen = last.step;
    }
    if (!paused) {
      timeline.now = stats.now;
      timeline.draw();
      if (!picked) describe(last);
    }
    show("up", `${stats.model} · ${stats.scheduler}`);
    if (!$("model").options.length) loadModels();
  } catch (error) {
    show("down", error.status ? error.message : "the server cannot be reached");
  }
}

async function keepLooking() {
  if (!document.hidden) await look();
  setTimeout(keepLooking, EVERY);
}

new Chat(settings);
setTheme();
loadModels();
keepLooking();
