// The fleet, live: asks /fleet once a second while it is seen, and shows what has changed since the last answer.

import { h } from "./dom.js";

const SECOND = 1000;
const KEPT = 120; // points of a curve: two minutes

const main = document.getElementById("main");
const state = document.getElementById("state");
let key = sessionStorage.getItem("admin-key") ?? "";
let last = null;
const curves = { tokens: [], requests: [], waiting: [] };

const number = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });

async function ask() {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const answer = await fetch("fleet", { headers, cache: "no-store" });
  if (answer.status === 401) return askForKey();
  if (!answer.ok) throw new Error(`the gateway answers ${answer.status}`);
  show(await answer.json());
}

function askForKey() {
  if (main.querySelector("form.key")) return;
  const field = h("input", { type: "password", name: "key", "aria-label": "Admin key", placeholder: "Admin key" });
  const form = h("form.key", {
    onsubmit: (event) => {
      event.preventDefault();
      key = field.value;
      sessionStorage.setItem("admin-key", key);
      form.remove();
      tick();
    },
  }, field, h("button.primary", { type: "submit" }, "Look"));
  main.replaceChildren(form);
  say(key ? "this key is not the gateway's" : "the gateway asks for its admin key", true);
}

function say(text, away = false) {
  state.textContent = text;
  state.className = away ? "away" : "";
}

function rate(name, fleet) {
  const seconds = last ? fleet.now - last.now : 0;
  return seconds > 0 ? Math.max(fleet[name] - last[name], 0) / seconds : 0;
}

function show(fleet) {
  const tokens = rate("output_tokens", fleet), requests = rate("requests", fleet);
  for (const [name, value] of [["tokens", tokens], ["requests", requests], ["waiting", fleet.waiting]]) {
    curves[name].push(value);
    if (curves[name].length > KEPT) curves[name].shift();
  }
  last = fleet;
  const ready = fleet.workers.filter((worker) => worker.state === "ready").length;
  say(`${ready} of ${fleet.workers.length} workers take requests`, ready < fleet.workers.length);
  main.replaceChildren(
    figures(fleet, tokens, requests),
    h("h2", "Workers"), workers(fleet),
    h("h2", "Queue"), queue(fleet),
    h("h2", "Tenants"), tenants(fleet),
  );
  for (const canvas of main.querySelectorAll("canvas")) draw(canvas, curves[canvas.dataset.curve]);
}

function figure(value, what, curve) {
  return h(".figure", h("b", value), h("span", what), curve && h("canvas", { "data-curve": curve, "aria-hidden": "true" }));
}

function figures(fleet, tokens, requests) {
  const cached = fleet.prompt_tokens ? (100 * fleet.cached_tokens) / fleet.prompt_tokens : 0;
  const expected = fleet.prompt_tokens ? (100 * fleet.predicted_tokens) / fleet.prompt_tokens : 0;
  return h(".figures",
    figure(number(tokens), "output tokens per second", "tokens"),
    figure(number(requests), "requests per second", "requests"),
    figure(number(fleet.waiting), "requests wait", "waiting"),
    figure(number(fleet.in_flight), "requests in flight"),
    figure(`${number(cached)} %`, "of prompt tokens cached"),
    figure(`${number(expected)} %`, "were expected there"),
  );
}

function workers(fleet) {
  const rows = fleet.workers.map((worker) => {
    const share = Math.min(worker.in_flight / worker.max_in_flight, 1);
    const fill = h("i");
    fill.style.width = `${100 * share}%`;
    return h("tr", { "data-worker": worker.name },
      h("td", worker.name),
      h(worker.state === "ready" ? "td" : "td.bad", worker.state),
      h(worker.breaker === "closed" ? "td" : "td.bad", worker.breaker),
      h("td", worker.models.join(", ") || "–"),
      h("td", h("span.bar", { title: `${worker.in_flight} of ${worker.max_in_flight}` }, fill), ` ${worker.in_flight}`),
      h("td.number", number(worker.tokens_in_flight)),
      h("td.number", number(worker.requests)),
      h(worker.failures ? "td.number.bad" : "td.number", number(worker.failures)),
      h("td.number", worker.kv_blocks === undefined ? "–" : number(worker.kv_blocks)),
      h(worker.kv_in_step === false ? "td.bad" : "td", worker.kv_in_step === undefined ? "–" : worker.kv_in_step ? "yes" : "no"),
    );
  });
  const numbers = ["Tokens in flight", "Requests", "Failures", "KV blocks"].map((name) => h("th.number", name));
  const heads = ["Worker", "State", "Breaker", "Models", "In flight"].map((name) => h("th", name));
  return table([...heads, ...numbers, h("th", "In step")], rows, "There are no workers.");
}

function queue(fleet) {
  const rows = fleet.lanes.map((lane) => h("tr",
    h("td", lane.model || "any"), h("td", lane.tenant || "–"), h("td.number", lane.priority), h("td.number", number(lane.waiting)),
  ));
  const heads = [h("th", "Model"), h("th", "Tenant"), h("th.number", "Priority"), h("th.number", "Waiting")];
  return table(heads, rows, "Nothing waits.");
}

function tenants(fleet) {
  const rows = fleet.tenants.map((tenant) => h("tr",
    h("td", tenant.name || "everyone"),
    h("td.number", number(tenant.in_flight)),
    h("td.number", tenant.budget_limit === null ? "–" : `${tenant.budget_left.toFixed(2)} of ${tenant.budget_limit.toFixed(2)}`),
  ));
  return table([h("th", "Tenant"), h("th.number", "In flight"), h("th.number", "Budget left")], rows, "There are no keys.");
}

function table(heads, rows, empty) {
  if (!rows.length) return h("p.empty", empty);
  return h(".scroll", h("table", h("thead", h("tr", heads)), h("tbody", rows)));
}

function draw(canvas, points) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const scale = window.devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  const most = Math.max(...points, 1e-9);
  pen.scale(scale, scale);
  pen.strokeStyle = getComputedStyle(document.body).getPropertyValue("--ink-soft") || "gray";
  pen.beginPath();
  points.forEach((value, place) => pen.lineTo((place / (KEPT - 1)) * width, height - 1 - (value / most) * (height - 2)));
  pen.stroke();
}

let timer = 0;

async function tick() {
  clearTimeout(timer);
  if (!document.hidden) {
    try {
      await ask();
    } catch (error) {
      say(error instanceof TypeError ? "the gateway does not answer" : error.message, true);
    }
  }
  timer = setTimeout(tick, SECOND);
}

document.addEventListener("visibilitychange", () => !document.hidden && tick());
tick();
