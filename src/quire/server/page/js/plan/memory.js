// What fills the memory: one bar for the plan, one for the server as it is, and the same as a table.

import { h } from "../dom.js";
import { whole } from "../engine/units.js";
import { inBinary } from "./units.js";

const TITLES = { kv_cache: "KV cache", adapters: "LoRA adapters" };
const SUMS = new Set(["total", "fits"]);

/** [name, title, bytes] of all that the server counts, in its order. */
const partsOf = (memory) =>
  Object.entries(memory)
    .filter(([name]) => !SUMS.has(name))
    .map(([name, size]) => [name, TITLES[name] ?? name, size]);

export class Memory {
  constructor() {
    this.verdict = h("span.verdict", { role: "status" });
    this.planned = new Bar("plan");
    this.here = new Bar("this server");
    this.rows = h("tbody");
    this.hereHead = h("th", { scope: "col" }, "this server");
    this.element = h(
      "section.panel.memory",
      { "aria-label": "Memory" },
      h("header", h("h3", "Memory"), this.verdict),
      h(".bars", this.planned.element, this.here.element),
      h("table", h("thead", h("tr", h("th", { scope: "col" }, h("span.hidden", "part")), h("th", { scope: "col" }, "plan"), this.hereHead)), this.rows),
    );
  }

  /** `served`: what the server has, where it is what is planned. */
  show(plan, served) {
    const { memory, hardware, load, kv } = plan;
    const room = hardware.memory_bytes;
    const scale = Math.max(memory.total, room, served ? served.weights + served.kv_cache : 0);
    const spare = room - memory.total;
    this.verdict.textContent = spare >= 0 ? `${inBinary(memory.total)} of ${inBinary(room)}: it fits` : `${inBinary(memory.total)}, and there are ${inBinary(room)}: ${inBinary(-spare)} are missing`;
    this.verdict.classList.toggle("over", spare < 0);
    this.planned.show(partsOf(memory), room, scale);
    this.here.element.hidden = this.hereHead.hidden = !served;
    if (served) this.here.show([["weights", "weights", served.weights], ["kv_cache", "KV cache", served.kv_cache]], room, scale);
    const notes = {
      kv_cache: `${whole(load.users)} × ${whole(load.context)} tokens, ${inBinary(kv.bytes_per_token)} each${kv.behind_windows ? ", less behind windows" : ""}`,
      weights: `${((8 * memory.weights) / plan.model.parameters).toFixed(1)} bits a parameter`,
    };
    const here = served && {
      weights: inBinary(served.weights),
      kv_cache: [inBinary(served.kv_cache), h("small", `for ${whole(served.cache_tokens)} tokens`)],
      total: served.resident ? [inBinary(served.resident), h("small", "touched so far")] : "",
    };
    const row = (name, title, size, note) =>
      h(`tr.${name}`, h("th", { scope: "row" }, h(`span.swatch.${name}`), title, note && h("small", note)), h("td", inBinary(size)), served && h("td", here[name] ?? ""));
    this.rows.replaceChildren(
      ...partsOf(memory).flatMap(([name, title, size]) => (size ? [row(name, title, size, notes[name])] : [])),
      row("total", "total", memory.total, ""),
      row(spare < 0 ? "over" : "free", spare < 0 ? "missing" : "free", Math.abs(spare), ""),
    );
  }
}

class Bar {
  constructor(title) {
    this.title = title;
    this.track = h(".track", { role: "img" });
    this.segments = new Map();
    this.limit = h("span.limit", { "aria-hidden": "true" });
    this.track.append(this.limit);
    this.element = h(".row", h("span.label", { "aria-hidden": "true" }, title), this.track);
  }

  /** Segments stay the same elements, so that they move when they change. */
  show(parts, room, scale) {
    let start = 0;
    for (const [name, title, size] of parts) {
      if (!this.segments.has(name)) {
        const made = h(`span.segment.${name}`);
        this.segments.set(name, made);
        this.track.append(made);
      }
      const segment = this.segments.get(name);
      place(segment, start, size, scale);
      segment.title = `${title}: ${inBinary(size)}`;
      start += size;
    }
    this.limit.style.left = `${(100 * room) / scale}%`;
    this.limit.hidden = room >= scale;
    this.track.classList.toggle("over", start > room);
    const said = parts.filter(([, , size]) => size).map(([, title, size]) => `${title} ${inBinary(size)}`);
    this.track.setAttribute("aria-label", `${this.title}: ${said.join(", ")}, of ${inBinary(room)}`);
  }
}

function place(element, start, size, scale) {
  element.style.left = `${(100 * start) / scale}%`;
  element.style.width = `${(100 * size) / scale}%`;
}
