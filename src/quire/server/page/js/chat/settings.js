// The panel beside a conversation: its system prompt, its parameters, and what can be done with the whole of it.

import { h, iconButton } from "../dom.js";
import { PARAMETERS, readNumber } from "./parameters.js";

export class Settings {
  /** `actions` are {label, run} for the foot of the panel. */
  constructor({ onchange, onclose, actions }) {
    this.onchange = onchange;
    this.fields = PARAMETERS.map((parameter) => this.#field(parameter));
    this.system = h("textarea", { placeholder: "Who should answer, and how?", oninput: () => this.#read() });
    this.stop = h("textarea.short", { placeholder: "one on each line", rows: "1", oninput: () => this.#read() });
    this.element = h(
      "aside.settings",
      { hidden: true, "aria-label": "Parameters", id: "settings" },
      h("header", h("h2", "Parameters"), iconButton("close", "Close parameters", onclose)),
      h("label", "System prompt", this.system),
      this.fields.map(({ label }) => label),
      h("label", "Stop at", this.stop),
      h(".actions", actions.map(({ label, run }) => h("button", { type: "button", onclick: run }, label))),
    );
  }

  #field(parameter) {
    const { name, label, hint, min, max, step } = parameter;
    const input = h("input", { type: "number", inputmode: "decimal", min, max, step: "any", placeholder: "default" });
    input.name = name;
    if (parameter.whole) input.step = String(step);
    input.addEventListener("input", () => this.#read());
    return { parameter, input, label: h("label.number", h("span", label, h("small", hint)), input) };
  }

  /** What the model advises stands where nothing is written. */
  advise(advice) {
    for (const { parameter, input } of this.fields) input.placeholder = advice[parameter.name] ?? "default";
  }

  show(chat) {
    this.chat = chat;
    this.system.value = chat.system;
    this.stop.value = (chat.params.stop ?? []).join("\n");
    for (const { parameter, input } of this.fields) {
      input.value = chat.params[parameter.name] ?? "";
      input.classList.remove("wrong");
    }
  }

  /** A wrong number is marked, and not sent. */
  #read() {
    const params = {};
    for (const { parameter, input } of this.fields) {
      const value = input.validity.badInput ? NaN : readNumber(input.value, parameter);
      input.classList.toggle("wrong", Number.isNaN(value));
      input.setAttribute("aria-invalid", String(Number.isNaN(value)));
      if (value !== undefined && !Number.isNaN(value)) params[parameter.name] = value;
    }
    const stop = this.stop.value.split("\n").filter((line) => line !== "");
    if (stop.length) params.stop = stop;
    Object.assign(this.chat, { system: this.system.value, params });
    this.onchange();
  }
}
