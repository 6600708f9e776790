// The life of each request, as bars on one clock, and in words when asked.

import { h } from "../dom.js";
import { Canvas } from "./canvas.js";
import { describe } from "./history.js";
import { colour, ownerColour } from "./palette.js";
import { inSeconds, whole } from "./units.js";

const ROWS = 24;
const WINDOWS = [10, 30, 60, 300]; // seconds; the first that shows every request in flight
const HEIGHT = 18;

export class Requests {
  /** `ours`: ids of requests that this page has sent. */
  constructor(ours) {
    this.ours = ours;
    this.rows = new Map();
    this.body = h("tbody");
    this.note = h("span.note");
    this.nothing = h("p.nothing", "No request has been seen yet.");
    this.since = h("span");
    const clock = h(".clock", h("span.hidden", "Life, from "), this.since, h("span", "now"));
    const head = h("tr", h("th.who.label", "Request"), h("th.doing.label", "State"), h("th.count.label", "Prompt → output"), h("th.label", clock));
    this.table = h("table", h("thead", head), this.body);
    this.element = h("section.panel.requests", { "aria-label": "Requests" }, h("header", h("h3", "Requests"), this.note), this.nothing, this.table, this.#legend());
  }

  #legend() {
    const key = (name, text) => h("span.key", h(`span.bar.${name}`), text);
    return h(".legend", key("queued", "queued"), key("prefill", "prompt"), key("decode", "output"), key("preempted", "preempted"), h("span", "a line: before anybody looked"));
  }

  show(history) {
    this.history = history;
    const shown = [...history.requests.values()].sort(byInterest).slice(0, ROWS);
    this.nothing.hidden = shown.length > 0;
    this.table.hidden = shown.length === 0;
    const oldest = Math.min(history.now, ...shown.filter((request) => !request.record).map((request) => request.arrival));
    this.window = WINDOWS.find((window) => window >= history.now - oldest) ?? WINDOWS.at(-1);
    const more = history.requests.size - shown.length;
    this.note.textContent = more > 0 ? `${more} more are not shown` : "";
    this.since.textContent = `${this.window} s ago`;
    const rows = shown.map((request) => {
      if (!this.rows.has(request.id)) this.rows.set(request.id, new Row(request, this.ours));
      return this.rows.get(request.id);
    });
    const keep = new Set(shown.map((request) => request.id));
    for (const id of this.rows.keys()) if (!keep.has(id)) this.rows.delete(id);
    const elements = rows.flatMap((row) => row.elements);
    if (elements.length !== this.body.children.length || elements.some((element, i) => this.body.children[i] !== element)) {
      this.body.replaceChildren(...elements);
    }
    this.draw();
  }

  draw() {
    if (!this.history) return;
    for (const row of this.rows.values()) row.update(this.history.now, this.window);
  }
}

/** Requests in flight in the order of arrival, then finished ones, the latest first. */
function byInterest(a, b) {
  if (!a.record !== !b.record) return a.record ? 1 : -1;
  return a.record ? b.record.finished - a.record.finished : a.number - b.number;
}

const STATES = { running: "running", waiting: "waiting", preempted: "preempted", stop: "done", length: "done", cancelled: "cancelled", error: "failed" };

class Row {
  constructor(request, ours) {
    this.request = request;
    this.canvas = new Canvas(() => HEIGHT, "");
    this.dot = h("span.dot");
    this.state = h("td.doing");
    this.count = h("td.count");
    this.words = h("td", { colspan: "4" });
    this.detail = h("tr.detail", { hidden: true }, this.words);
    this.button = h("button", { type: "button", "aria-expanded": "false", title: "Its life in words", onclick: () => this.#toggle() }, this.dot, request.id, ours.has(request.id) && h("span.mine", "yours"));
    this.elements = [h("tr", h("td.who", this.button), this.state, this.count, h("td", this.canvas.element)), this.detail];
  }

  #toggle() {
    this.detail.hidden = !this.detail.hidden;
    this.button.setAttribute("aria-expanded", String(!this.detail.hidden));
  }

  update(now, window) {
    const { request } = this;
    const owner = ownerColour(request.number);
    this.dot.style.background = owner;
    this.state.textContent = STATES[request.state] ?? request.state;
    const cached = request.cached ? ` (${whole(request.cached)} cached)` : "";
    this.count.textContent = `${whole(request.prompt)}${cached} → ${whole(request.output)}`;
    const words = describe(request, now, inSeconds);
    this.canvas.describe(words);
    if (!this.detail.hidden) this.words.textContent = words;
    this.#draw(now, window, owner);
  }

  #draw(now, window, owner) {
    const surface = this.canvas.begin();
    if (!surface) return;
    const { context, width } = surface;
    const x = (time) => width - ((now - time) / window) * (width - 8) - 8;
    for (const { kind, from, to } of this.request.spans) {
      const left = Math.max(x(from), 0);
      const right = x(to ?? now);
      if (right < 0) continue;
      BARS[kind](context, left, Math.max(right - left, 1), owner, this.request.number);
    }
    const end = this.request.record && x(this.request.record.finished);
    if (end > 0) {
      context.fillStyle = colour(this.request.record.finish_reason === "error" ? "warn" : "ink");
      context.fillRect(end, 2, 1.5, HEIGHT - 4);
    }
  }
}

const BARS = {
  unseen: (context, x, width) => {
    context.fillStyle = colour("rule");
    context.fillRect(x, HEIGHT / 2 - 0.5, width, 1);
  },
  queued: (context, x, width) => {
    context.strokeStyle = colour("ink-soft");
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, 5.5, Math.max(width - 1, 0.5), HEIGHT - 11);
  },
  prefill: (context, x, width, owner) => {
    context.fillStyle = owner;
    context.fillRect(x, 2, Math.max(width - 0.5, 1), HEIGHT - 4);
  },
  decode: (context, x, width, _, number) => {
    context.fillStyle = ownerColour(number, 0.45);
    context.fillRect(x, 5, width, HEIGHT - 10);
  },
  preempted: (context, x, width) => {
    context.fillStyle = colour("warn");
    for (let at = x; at < x + width; at += 4) context.fillRect(at, 5, 1.5, HEIGHT - 10);
  },
};
