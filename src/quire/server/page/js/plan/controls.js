// What can be chosen: selects, two sliders, and numbers that are seldom changed.

import { h } from "../dom.js";
import { whole } from "../engine/units.js";
import { outputOf, promptOf, read } from "./choices.js";
import { CONTEXTS, USERS, nearestStop } from "./scales.js";
import { inBinary } from "./units.js";

const DEVICES = [1, 2, 4, 8, 16, 32];

export class Controls {
  /** `onchange` is called with {field: value}. */
  constructor(onchange) {
    this.onchange = onchange;
    this.shape = this.#select("shape", "Model");
    this.format = this.#select("format", "Weights");
    this.dtype = this.#select("kv_cache_dtype", "KV cache");
    this.hardware = this.#select("hardware", "Hardware");
    this.tp = this.#select("tp", "Devices");
    this.context = this.#slider("context", "Context", CONTEXTS, "tokens of a user");
    this.users = this.#slider("users", "Users", USERS, "at once");
    this.numbers = [
      this.#number("prompt", "Prompt", "tokens"),
      this.#number("output", "Output", "tokens"),
      this.#number("loras", "LoRA adapters", "in memory"),
      this.#number("rank", "Their rank", ""),
      this.#number("price", "Price", "$ an hour, one device"),
    ];
    this.more = h("details", h("summary", "Prompt, adapters, price"), this.numbers.map(({ label }) => label));
    this.element = h(
      "form.controls",
      { "aria-label": "What to plan", onsubmit: (event) => event.preventDefault() },
      h(".sliders", this.context.label, this.users.label),
      h(
        ".selects",
        this.shape.label,
        h(".pair", this.format.label, this.dtype.label),
        h(".pair.wide-first", this.hardware.label, this.tp.label),
        this.more,
      ),
    );
  }

  #select(name, title) {
    const select = h("select", { name, onchange: () => this.onchange({ [name]: read(name, select.value) }) });
    return { name, field: select, label: h("label.field", h("span", title), select) };
  }

  #slider(name, title, stops, unit) {
    const output = h("output");
    const input = h("input", { type: "range", name, min: 0, max: stops.length - 1, step: 1 });
    input.addEventListener("input", () => {
      show(stops[Number(input.value)]);
      this.onchange({ [name]: stops[Number(input.value)] });
    });
    const show = (value) => {
      output.textContent = whole(value);
      input.setAttribute("aria-valuetext", `${whole(value)} ${unit}`);
    };
    const set = (value) => {
      input.value = nearestStop(stops, value);
      show(value);
    };
    return { name, field: input, set, label: h("label.field.slider", h("span", title, h("small", unit)), output, input) };
  }

  /** A number that cannot be is marked, and not sent. */
  #number(name, title, unit) {
    const input = h("input", { type: "number", name, min: 0, step: name === "price" ? "any" : 1, inputmode: "decimal" });
    input.addEventListener("input", () => {
      const value = input.value === "" && !input.validity.badInput ? null : read(name, input.value);
      input.setAttribute("aria-invalid", String(value === undefined));
      if (value !== undefined) this.onchange({ [name]: value });
    });
    return { name, field: input, label: h("label.field.number", h("span", title, unit && h("small", unit)), input) };
  }

  /** `known`: the names that the server knows, once it has said so. */
  show(choices, model, known) {
    const shapes = known?.shapes ?? [choices.shape].filter(Boolean);
    fill(this.shape.field, choices.shape, [], [["Served here", [["", model || "its model"]]], ["Well-known models", shapes.map((name) => [name, name])]]);
    const formats = (known?.formats ?? [choices.format].filter(Boolean)).map((name) => [name, name]);
    const published = known?.published?.[choices.shape];
    const usual = published ? `${published} (as published)` : "bfloat16";
    fill(this.format.field, choices.shape ? choices.format : "", choices.shape ? [["", usual], ...formats.filter(([name]) => name !== usual)] : [["", "as stored"]]);
    this.format.field.disabled = !choices.shape;
    const dtypes = (known?.kv_cache_dtypes ?? ["auto", choices.kv_cache_dtype]).filter((name) => name && name !== "auto");
    fill(this.dtype.field, choices.kv_cache_dtype, [["", choices.shape ? `${isGPU(choices, known) ? "bfloat16" : "float16"} (auto)` : "as served"], ...dtypes.map((name) => [name, name])]);
    this.#showHardware(choices, known?.hardware ?? []);
    this.context.set(choices.context);
    this.users.set(choices.users);
    for (const { name, field } of this.numbers) if (field !== document.activeElement) field.value = choices[name] ?? "";
    const hints = { prompt: promptOf(choices), output: outputOf(choices), loras: 0, rank: 16, price: "typical" };
    for (const { name, field } of this.numbers) field.placeholder = hints[name];
    if (this.numbers.some(({ name }) => choices[name] !== null)) this.more.open = true;
  }

  #showHardware(choices, rows) {
    const option = ({ name, memory_bytes: memory }) => [name, `${name} · ${inBinary(memory)}`];
    const groups = [
      ["GPUs", rows.filter((row) => row.is_gpu).map(option)],
      ["CPUs", rows.filter((row) => !row.is_gpu).map(option)],
    ];
    const unknown = choices.hardware && !rows.length ? [[choices.hardware, choices.hardware]] : [];
    fill(this.hardware.field, choices.hardware, [["", "this machine"], ...unknown], rows.length ? groups : []);
    const alone = !choices.hardware || rows.some((row) => row.name === choices.hardware && !row.links);
    fill(this.tp.field, alone ? "1" : String(choices.tp), (alone ? [1] : [...new Set([...DEVICES, choices.tp])].sort((a, b) => a - b)).map((n) => [String(n), String(n)]));
    this.tp.field.disabled = alone;
  }

  /** Which field the server complains of; null: none. */
  mark(wrong) {
    for (const { name, field } of [this.shape, this.format, this.dtype, this.hardware, this.tp, this.context, this.users, ...this.numbers]) {
      field.classList.toggle("wrong", name === wrong);
    }
  }
}

function isGPU(choices, known) {
  return choices.hardware ? known?.hardware.find((row) => row.name === choices.hardware)?.is_gpu : known?.on_gpu;
}

/** Options as [value, text], then groups of them. They are made anew only where they differ: a list that is open stays open. */
function fill(select, value, options, groups = []) {
  const wanted = JSON.stringify([options, groups]);
  if (select.dataset.options !== wanted) {
    const made = ([each, text]) => h("option", { value: each }, text);
    select.replaceChildren(...options.map(made), ...groups.map(([label, rows]) => h("optgroup", { label }, rows.map(made))));
    select.dataset.options = wanted;
  }
  select.value = value;
}
