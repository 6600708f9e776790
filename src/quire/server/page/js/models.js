// Which model is asked: the choice in the masthead.

import { h } from "./dom.js";
import { listModels } from "./api.js";
import { kept } from "./storage.js";

const CHOSEN = "quire.model";

/** [{id, text, advice}] of the models that generate text; models that only embed are left out. */
export function offered(models) {
  return models
    .filter(({ task }) => task !== "embed" && task !== "score")
    .map(({ id, parent, max_model_len: length, default_sampling_params: advice }) => {
      const more = parent ? ` (adapter of ${parent})` : length === null ? " (loads when asked)" : "";
      return { id, text: id + more, advice: advice ?? {} };
    });
}

export class ModelChoice {
  constructor(select, onchange) {
    this.select = select;
    this.models = [];
    select.disabled = true;
    select.addEventListener("change", () => {
      kept.setItem(CHOSEN, select.value);
      onchange();
    });
  }

  get value() {
    return this.select.value;
  }

  /** The sampling parameters that the chosen model advises. */
  get advice() {
    return this.models.find(({ id }) => id === this.value)?.advice ?? {};
  }

  /** Take over the model of a conversation, if it is still served. */
  choose(name) {
    if ([...this.select.options].some((option) => option.value === name)) this.select.value = name;
  }

  async refresh() {
    const models = (this.models = offered(await listModels()));
    const chosen = this.select.value || kept.getItem(CHOSEN);
    this.select.replaceChildren(...models.map(({ id, text }) => h("option", { value: id }, text)));
    this.select.disabled = models.length === 0;
    if (!models.length) this.select.append(h("option", { value: "" }, "no model to talk to"));
    this.choose(chosen);
  }
}
